"""Which of surefoot's own kernels a run uses, and the plainest form of a config that everything faster is held against.

Whether the kernels compute the same is measured before step 1. `plainly(config)` asks for textbook attention, every
example in a row of its own, no kernel of surefoot's, nothing compiled; doctor, tune and the benchmarks each add in
which type products are, and how much goes through the model at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.config.dump import plain_config
from surefoot.config.overrides import with_settings
from surefoot.config.schema import KernelsConfig, RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.method_facts.methods import METHODS
from surefoot.planning.measurements import PointwiseTrial
from surefoot.planning.notes import Notes
from surefoot.planning.plan import OFF, PLAIN, AdapterPlan, Choice, KernelsPlan, PackedType
from surefoot.system.hardware import Hardware

CUTTING = ("fsdp2", "deepspeed")  # engines whose parameters are whole only while the module's own forward runs
FUSED = "fused"
_CLEAR = 1.2  # how many times as fast fused norms and rotations must be
_PARTS = "a layer's norms and rotations"


def plan_kernels(
    config: RunConfig,
    model: ModelFacts,
    adapter: AdapterPlan | None,
    hardware: Hardware,
    *,
    packed: PackedType | None,
    qat: str,
    engine: str,
    bos_scale: float,
    documents: Choice[str],
    balanced: bool,
    trials: Sequence[PointwiseTrial],
    notes: Notes,
) -> KernelsPlan:
    """Which of surefoot's own kernels the run uses.

    config: the run's.
    model: facts of the model.
    adapter: as planned; None for full fine-tuning.
    hardware: the machine to plan for.
    packed: in what the base is quantised; None where it is not.
    qat: off, or what the base's layers are rounded to in training.
    engine: single, ddp, fsdp2 or deepspeed.
    bos_scale: factor of the BOS embedding.
    documents: the form of attention over packed rows, or plain.
    balanced: whether a mixture's load-balancing loss is added.
    trials: what was measured of norms and rotations; empty where nobody measured.
    notes: refusals are added here.
    """
    requested, compiled = config.kernels, config.compile != "off"
    of_adapter = adapter_obstacle(adapter, packed=packed, qat=qat, engine=engine, compiled=compiled)
    of_loss = loss_obstacle(config.stage, adapter, model, engine)
    of_last = last_block_obstacle(config.stage, adapter, model, engine=engine, compiled=compiled, bos_scale=bos_scale)
    of_last = "the load-balancing loss is over all tokens of all layers" if balanced else of_last
    return KernelsPlan(
        adapter=_choice("adapter", requested.adapter, "fast", of_adapter, notes),
        loss=_choice("loss", requested.loss, "chunked", of_loss, notes),
        last_block=_choice("last_block", requested.last_block, "pruned", of_last, notes),
        pointwise=_pointwise(config, model, hardware, engine, trials, notes),
        documents=documents,
    )


def head_rows(*, trains: bool) -> int:
    """Positions whose logits exist at once. Measured on a CPU at 32 k and 128 k words: for a frozen head 256 are as
    fast as any; one that trains adds to a gradient of its own size each time, and is as fast as the plain path from 512
    on and faster with 1 024."""
    return 1024 if trains else 256


def loss_obstacle(stage: str, adapter: AdapterPlan | None, model: ModelFacts, engine: str) -> str:
    """Why head and loss cannot go a few positions at a time; empty where they can, as far as a plan can tell: what the
    model does to its logits, only the model shows."""
    method = METHODS[stage]
    if method.scores:
        return f"stage {stage} computes no logits"
    if method.rollouts:
        return f"stage {stage} looks at the whole distribution over the vocabulary"
    if engine in CUTTING:
        return f"{engine} hands the head its weights only while the model's own forward runs"
    if model.family is not None and model.family.beyond_head:
        return model.family.beyond_head
    if adapter is None:
        return f"stage {stage} weighs each answer by itself, and the head trains" if method.weighs_answers else ""
    if model.head in adapter.targets.value or any(model.head.endswith(name) for name in adapter.modules_to_save):
        return "the adapter is also on the output head"
    return ""


def adapter_obstacle(
    adapter: AdapterPlan | None, *, packed: PackedType | None, qat: str = OFF, engine: str, compiled: bool
) -> str:
    """Why the adapter's own kernels cannot run; empty where they can."""
    if adapter is None:
        return "full fine-tuning has no adapter"
    if packed:
        return f"a base in {packed} is unpacked by layers of its own"
    if qat != OFF:
        return f"precision.qat: {qat} rounds weights in torchao's own layers, which it would pass by"
    if engine in CUTTING:
        return f"{engine} hands each module its weights only while PEFT's own forward runs"
    return "torch.compile cannot trace it" if compiled else ""


def last_block_obstacle(
    stage: str, adapter: AdapterPlan | None, model: ModelFacts, *, engine: str, compiled: bool, bos_scale: float
) -> str:
    """Why the last layer computes all rows; empty where it can leave some out, as far as a plan can tell: how the layer
    is built, only the model shows."""
    if METHODS[stage].plain_texts:
        return f"stage {stage} reads all positions"
    if engine in CUTTING:
        return f"{engine} has hooks on the layer that look at all of its rows"
    if compiled:
        return "how many rows are read changes with every batch, and torch.compile would compile for each number"
    if (adapter is not None and adapter.dropout) or model.dropouts or model.attention_dropout:
        return "with dropout, masks would be drawn for other rows"
    return "bos.scale has hooks on the layer that look at all of its rows" if bos_scale != 1 else ""


def _choice(key: str, requested: str, fast: str, obstacle: str, notes: Notes) -> Choice[str]:
    """The plain path where it is asked for or there is an obstacle, else the fast one."""
    if requested == PLAIN:
        return Choice(PLAIN, "asked for", "user")
    if requested != "auto" and obstacle:
        notes.refuse(f"kernels.{key}", f"{requested} cannot run here: {obstacle}", f"set kernels.{key}: auto")
    if obstacle:
        return Choice(PLAIN, obstacle, "default")
    if requested == "auto":
        return Choice(fast, "the same up to rounding, which is checked before step 1", "default")
    return Choice(requested, "asked for", "user")


def _pointwise(
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    engine: str,
    trials: Sequence[PointwiseTrial],
    notes: Notes,
) -> Choice[str]:
    """Norms and rotary positions go through surefoot's own kernels where those were seen to be right on this CPU and
    clearly faster at the model's width, forward and backward together, so that the next start finds the same."""
    requested = config.kernels.pointwise
    if requested == PLAIN:
        return Choice(PLAIN, "asked for", "user")
    why = pointwise_obstacle(config, model, hardware)
    if engine in CUTTING:
        why = f"{engine} hands each module its weights only while the module's own forward runs"
    failed = "; ".join(f"{trial.part}: {trial.failure}" for trial in trials if trial.failure)
    if failed and not why:
        why = f"not right on this machine ({failed})"
    if requested == FUSED:
        if why:
            notes.refuse("kernels.pointwise", f"fused cannot run here: {why}", "set kernels.pointwise: auto")
        return Choice(FUSED, f"asked for; {_pointwise_times(model, trials)}" if trials else "asked for", "user")
    if why:
        return Choice(PLAIN, why, "measured" if failed else "default")
    if not trials:
        there = f"there {_PARTS} are timed plain and fused; fused is taken where {_CLEAR:g} x as fast"
        return Choice(PLAIN, there if hardware.preset else "nothing was measured", "default")
    plain, fused = _layer_seconds(model, trials)
    if plain < _CLEAR * fused:
        return Choice(PLAIN, f"little to gain: {_pointwise_times(model, trials)}", "measured")
    return Choice(FUSED, _pointwise_times(model, trials), "measured")


def pointwise_obstacle(config: RunConfig, model: ModelFacts, hardware: Hardware) -> str:
    """Why they cannot run, whatever the probe would say; empty where they can."""
    if hardware.kind != "cpu":
        return "surefoot's own norms and rotations run on a CPU"
    if config.compile != "off":
        return "torch.compile writes kernels of its own for these operators"
    if model.layer_norm:
        return "this family has LayerNorm, which torch computes in one pass already"
    return ""


def _layer_seconds(model: ModelFacts, trials: Sequence[PointwiseTrial]) -> tuple[float, float]:
    """Seconds of one decoder layer, plain and fused: with as many norms as a layer has."""
    count = {"norm": len(model.norms)}
    plain = sum(count.get(trial.part, 1) * trial.plain for trial in trials)
    return plain, sum(count.get(trial.part, 1) * trial.fused for trial in trials)


def _pointwise_times(model: ModelFacts, trials: Sequence[PointwiseTrial]) -> str:
    plain, fused = (1000 * seconds for seconds in _layer_seconds(model, trials))
    return f"milliseconds of {_PARTS}, forward and backward here: plain {plain:.3g}, fused {fused:.3g}"


PLAINEST: Mapping[str, str] = {  # dotted key -> value, short forms among them
    "attention": "eager",
    "data.packing": "off",
    "compile": "off",
    **{f"kernels.{name}": PLAIN for name in KernelsConfig.model_fields},
}


def plainly(config: RunConfig) -> RunConfig:
    """The config with these in place of what it has."""
    return RunConfig.model_validate(with_settings(plain_config(config), PLAINEST))


def plain_kernels() -> KernelsConfig:
    """None of surefoot's."""
    return KernelsConfig.model_validate(dict.fromkeys(KernelsConfig.model_fields, PLAIN))
