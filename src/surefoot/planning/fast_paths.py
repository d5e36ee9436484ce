"""Choose which of surefoot's own kernels a run uses, and define the plainest form of a config as their reference.

Whether the kernels compute the same is checked before step 1. `plainly(config)` selects eager attention, padded rows,
none of surefoot's kernels and no compilation; doctor, tune and the benchmarks add the dtype of products and the batch
size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from surefoot.config.dump import plain_config
from surefoot.config.overrides import with_settings
from surefoot.config.schema import KernelsConfig, RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.method_facts.methods import METHODS
from surefoot.planning.experts import adapts_experts, summed_bytes
from surefoot.planning.measurements import PointwiseTrial
from surefoot.planning.notes import Notes
from surefoot.planning.plan import OFF, PLAIN, AdapterPlan, Choice, KernelsPlan, PackedType
from surefoot.system.hardware import Hardware
from surefoot.system.messages import size_text

FUSED = "fused"
EXPERTS = "experts"  # of the adapter kernels, only those for experts
_CLEAR = 1.2  # minimum speed-up of fused norms and rotary embeddings
# Up to which share of a weight a change is rounded away: half of the largest step between two numbers of 8 and 11 bits.
_LOST = {"bf16": "0.4 %", "fp16": "0.05 %"}
# What a key of `kernels:` is about, as part of a sentence.
_ABOUT = {
    "pointwise": "a layer's norms",
    "rotary": "a layer's rotary embeddings",
    "gated": "a layer's gated activations",
}
# Activations in config.json that liger-kernel has with a gate -> what `surefoot.kernels.liger` calls them.
GATES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # of an MLP: gate, up, down


def plan_kernels(
    config: RunConfig,
    model: ModelFacts,
    adapter: AdapterPlan | None,
    hardware: Hardware,
    *,
    packed: PackedType | None,
    qat: str,
    base: str,
    sharder: str,
    bos_scale: float,
    documents: Choice[str],
    balanced: bool,
    trials: Sequence[PointwiseTrial],
    notes: Notes,
) -> KernelsPlan:
    """Choose which of surefoot's own kernels the run uses.

    config: the run's config.
    model: facts of the model.
    adapter: the planned adapter; None for full fine-tuning.
    hardware: the machine to plan for.
    packed: quantized type of the base; None if it is not quantized.
    qat: off, or what the base's layers are rounded to in training.
    base: dtype of the base's weights.
    sharder: the engine if it shards weights, else empty; only kernels for experts run under it.
    bos_scale: factor of the BOS embedding.
    documents: the form of attention over packed rows, or plain.
    balanced: whether a mixture's load-balancing loss is added.
    trials: measurements of norms, rotary embeddings and gated activations; empty if there are none.
    notes: refusals and cautions are added here.
    """
    requested, compiled = config.kernels, config.compile != "off"
    of_adapter = adapter_obstacle(adapter, packed=packed, qat=qat, sharder=sharder, compiled=compiled)
    of_loss = loss_obstacle(config.stage, adapter, model, sharder)
    of_last = last_block_obstacle(config.stage, adapter, model, sharder=sharder, compiled=compiled, bos_scale=bos_scale)
    of_last = "the load-balancing loss is over all tokens of all layers" if balanced else of_last
    of_layers = _choice("adapter", requested.adapter, "fast", of_adapter, notes)
    # Nothing of these is kept from one forward pass to the next.
    alone = not adapter_obstacle(adapter, packed=packed, qat=qat, sharder="", compiled=compiled)
    if sharder and alone and requested.adapter == "auto" and adapts_experts(model, adapter):
        of_layers = Choice(EXPERTS, f"experts alone: {of_adapter}", "default")
    if adapter and adapter.parameters and of_layers.value == PLAIN and (lost := _LOST.get(base)):
        copied = size_text(summed_bytes(model, adapter, 2))
        notes.caution(
            f"PEFT adds B A to {adapter.parameters[0]} and all others in {base}: changes below {lost} of a weight are "
            f"rounded away, and a copy of {copied} a layer is kept (kernels.adapter: fast does neither: "
            f"{of_layers.reason}); precision.base: fp32 keeps the changes"
        )
    return KernelsPlan(
        adapter=of_layers,
        loss=_choice("loss", requested.loss, "chunked", of_loss, notes),
        last_block=_choice("last_block", requested.last_block, "pruned", of_last, notes),
        pointwise=_fused("pointwise", config, model, hardware, sharder, trials, notes),
        rotary=_fused("rotary", config, model, hardware, sharder, trials, notes),
        gated=_fused("gated", config, model, hardware, sharder, trials, notes),
        documents=documents,
    )


COMPARED_AT_ONCE = 256  # positions of a student and its teacher, where the student's logits exist already


def head_rows(*, trains: bool) -> int:
    """Number of positions whose logits exist at once. Measured on a CPU with vocabularies of 32 k and 128 k: for a
    frozen head 256 are as fast as any; a trained head adds to a gradient of its own size each time, and is as fast as
    the plain path from 512 and faster with 1 024."""
    return 1024 if trains else 256


def loss_obstacle(stage: str, adapter: AdapterPlan | None, model: ModelFacts, sharder: str) -> str:
    """Return why head and loss cannot be computed in chunks; empty if they can, as far as the plan knows (how the model
    changes its logits is only known once it is loaded)."""
    method = METHODS[stage]
    if method.scores:
        return f"stage {stage} computes no logits"
    if method.critic:
        return f"stage {stage} needs the whole distribution over the vocabulary"
    if sharder:
        return f"{sharder} hands the head its weights only while the model's own forward runs"
    if adapter is None:
        weighs = method.weighs_answers or method.rollouts
        return f"stage {stage} weights each answer separately, and the head is trained" if weighs else ""
    if model.head in adapter.targets.value or any(model.head.endswith(name) for name in adapter.modules_to_save):
        return "the adapter includes the output head"
    return ""


def adapter_obstacle(
    adapter: AdapterPlan | None, *, packed: PackedType | None, qat: str = OFF, sharder: str, compiled: bool
) -> str:
    """Return why the adapter kernels cannot run; empty if they can."""
    if adapter is None:
        return "full fine-tuning has no adapter"
    if packed:
        return f"a base in {packed} is unpacked by layers of its own"
    if qat != OFF:
        return f"precision.qat: {qat} rounds weights in layers of its own, which the kernels would bypass"
    if sharder:
        return f"{sharder} hands each module its weights only while PEFT's own forward runs"
    return "torch.compile cannot trace it" if compiled else ""


def last_block_obstacle(
    stage: str, adapter: AdapterPlan | None, model: ModelFacts, *, sharder: str, compiled: bool, bos_scale: float
) -> str:
    """Return why the last layer must compute all rows; empty if it can skip some, as far as the plan knows (how the
    layer is built is only known once it is loaded)."""
    if METHODS[stage].plain_texts:
        return f"stage {stage} needs all positions"
    if sharder:
        return f"{sharder} has hooks on the layer that need all of its rows"
    if compiled:
        return "the number of rows changes with every batch, and torch.compile would recompile for each"
    if (adapter is not None and adapter.dropout) or model.dropouts or model.attention_dropout:
        return "dropout masks would be drawn for other rows"
    return "bos.scale has hooks on the layer that need all of its rows" if bos_scale != 1 else ""


def _choice(key: str, requested: str, fast: str, obstacle: str, notes: Notes) -> Choice[str]:
    """The plain path if it is requested or there is an obstacle, else the fast one."""
    if requested == PLAIN:
        return Choice(PLAIN, "asked for", "user")
    if requested != "auto" and obstacle:
        notes.refuse(f"kernels.{key}", f"{requested} is not supported here: {obstacle}", f"set kernels.{key}: auto")
    if obstacle:
        return Choice(PLAIN, obstacle, "default")
    if requested == "auto":
        return Choice(fast, "the same up to rounding, which is checked before step 1", "default")
    return Choice(requested, "asked for", "user")


def _fused(
    key: str,
    config: RunConfig,
    model: ModelFacts,
    hardware: Hardware,
    sharder: str,
    trials: Sequence[PointwiseTrial],
    notes: Notes,
) -> Choice[str]:
    """Use fused operators of a key if they are correct on this machine and clearly faster at the model's width, forward
    and backward together, so that the next start decides the same.

    key: pointwise | rotary | gated.
    """
    requested = getattr(config.kernels, key)
    if requested == PLAIN:
        return Choice(PLAIN, "asked for", "user")
    trials = [trial for trial in trials if trial.part in _parts_of(key, hardware.kind)]
    about = _ABOUT[key] if hardware.kind == "cuda" else "a layer's norms and rotations"
    why = pointwise_obstacle(key, config, model, hardware)
    if sharder and not why:
        why = f"{sharder} gathers a module's weights only during the module's own forward"
    failed = "; ".join(f"{trial.part}: {trial.failure}" for trial in trials if trial.failure)
    if failed and not why:
        why = f"wrong on this machine ({failed})"
    if requested == FUSED:
        if why:
            notes.refuse(f"kernels.{key}", f"fused is not supported here: {why}", f"set kernels.{key}: auto")
        return Choice(FUSED, f"asked for; {_times(about, model, trials)}" if trials else "asked for", "user")
    if why:
        return Choice(PLAIN, why, "measured" if failed else "default")
    if not trials:
        there = f"there {about} are timed plain and fused; fused is taken where {_CLEAR:g} x as fast"
        return Choice(PLAIN, there if hardware.preset else "nothing was measured", "default")
    plain, fused = _layer_seconds(model, trials)
    if plain < _CLEAR * fused:
        return Choice(PLAIN, f"little to gain: {_times(about, model, trials)}", "measured")
    return Choice(FUSED, _times(about, model, trials), "measured")


def _parts_of(key: str, kind: str) -> tuple[str, ...]:
    """Return the parts of the probe that decide a key; on a CPU one key has norms and rotations. kind: cpu | cuda."""
    if key == "pointwise":
        return ("norm",) if kind == "cuda" else ("norm", "rotary")
    return (key,)


def open_parts(config: RunConfig, model: ModelFacts, hardware: Hardware) -> tuple[str, ...]:
    """Return the parts of the probe on which the plan depends: norm | rotary | gated."""
    keys = [
        key
        for key in _ABOUT
        if getattr(config.kernels, key) != PLAIN and not pointwise_obstacle(key, config, model, hardware)
    ]
    return tuple(part for key in keys for part in _parts_of(key, hardware.kind))


def pointwise_obstacle(key: str, config: RunConfig, model: ModelFacts, hardware: Hardware) -> str:
    """Return why the kernels of a key cannot run, regardless of the probe; empty if they can.

    key: pointwise | rotary | gated.
    """
    if hardware.kind == "mps":
        return "surefoot's norms and rotations run on a CPU, and those of liger-kernel on a GPU of NVIDIA or AMD"
    if hardware.kind == "cpu" and key == "rotary":
        return "on a CPU kernels.pointwise includes them"
    if hardware.kind == "cpu" and key == "gated":
        return "on a CPU the plain ones are as fast"
    if hardware.kind == "cuda" and hardware.liger is False:
        return "liger-kernel, whose kernels run on a GPU, is not installed"
    if config.compile != "off":
        return "torch.compile writes kernels of its own for these operators"
    if key == "pointwise" and model.layer_norm:
        return "this family has LayerNorm, which torch computes in one pass already"
    if key == "gated" and not (model.gated and model.activation in GATES):
        return "this family's MLPs have no gate with SiLU or GELU in its tanh form"
    if key == "gated" and not _named_gates(model):
        return "this family's MLPs have gate and up in one matrix, or by other names"
    return ""


def _named_gates(model: ModelFacts) -> bool:
    names = {module.name.rpartition(".")[2] for module in model.layer_linears}
    return any(names.issuperset(projections) for projections in PROJECTIONS)


def _layer_seconds(model: ModelFacts, trials: Sequence[PointwiseTrial]) -> tuple[float, float]:
    """Seconds of one decoder layer, plain and fused, with as many norms as a layer has."""
    count = {"norm": len(model.norms)}
    plain = sum(count.get(trial.part, 1) * trial.plain for trial in trials)
    return plain, sum(count.get(trial.part, 1) * trial.fused for trial in trials)


def _times(about: str, model: ModelFacts, trials: Sequence[PointwiseTrial]) -> str:
    plain, fused = (1000 * seconds for seconds in _layer_seconds(model, trials))
    return f"milliseconds of {about}, forward and backward here: plain {plain:.3g}, fused {fused:.3g}"


PLAINEST: Mapping[str, str] = {  # dotted key -> value, short forms among them
    "attention": "eager",
    "data.packing": "off",
    "compile": "off",
    **{f"kernels.{name}": PLAIN for name in KernelsConfig.model_fields},
}


def plainly(config: RunConfig) -> RunConfig:
    """Return the config with the `PLAINEST` settings."""
    return RunConfig.model_validate(with_settings(plain_config(config), PLAINEST))


def plain_kernels() -> KernelsConfig:
    """Kernel settings with none of surefoot's kernels."""
    return KernelsConfig.model_validate(dict.fromkeys(KernelsConfig.model_fields, PLAIN))
