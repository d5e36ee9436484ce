"""Which of surefoot's own kernels a run uses, and the plainest form of a config that everything faster is held against.

Whether the kernels compute the same is measured before step 1. `plainly(config)` asks for textbook attention, every
example in a row of its own, no kernel of surefoot's, nothing compiled; doctor, tune and the benchmarks each add in
which type products are, and how much goes through the model at once.
"""

from __future__ import annotations

from collections.abc import Mapping

from surefoot.config.dump import plain_config
from surefoot.config.overrides import with_settings
from surefoot.config.schema import KernelsConfig, RunConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.method_facts.methods import METHODS
from surefoot.planning.notes import Notes
from surefoot.planning.plan import PLAIN, AdapterPlan, Choice, KernelsPlan

CUTTING = ("fsdp2", "deepspeed")  # engines whose parameters are whole only while the module's own forward runs


def plan_kernels(
    request: KernelsConfig,
    adapter: AdapterPlan | None,
    *,
    stage: str,
    model: ModelFacts,
    packed: bool,
    engine: str,
    compiled: bool,
    bos_scale: float,
    notes: Notes,
) -> KernelsPlan:
    """packed: the base is held in nf4. engine: single, ddp, fsdp2 or deepspeed.
    compiled: torch.compile is on. bos_scale: of the BOS embedding."""
    of_adapter = adapter_obstacle(adapter, packed=packed, engine=engine, compiled=compiled)
    of_loss = loss_obstacle(stage, adapter, model, engine)
    of_last = last_block_obstacle(stage, adapter, model, engine=engine, compiled=compiled, bos_scale=bos_scale)
    return KernelsPlan(
        adapter=_choice("adapter", request.adapter, "fast", of_adapter, notes),
        loss=_choice("loss", request.loss, "chunked", of_loss, notes),
        last_block=_choice("last_block", request.last_block, "pruned", of_last, notes),
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


def adapter_obstacle(adapter: AdapterPlan | None, *, packed: bool, engine: str, compiled: bool) -> str:
    """Why the adapter's own kernels cannot run; empty where they can."""
    if adapter is None:
        return "full fine-tuning has no adapter"
    if packed:
        return "a base in nf4 is unpacked by layers of its own"
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


def _choice(key: str, asked: str, fast: str, obstacle: str, notes: Notes) -> Choice[str]:
    """The plain path where it is asked for or there is an obstacle, else the fast one."""
    if asked == PLAIN:
        return Choice(PLAIN, "asked for", "user")
    if asked != "auto" and obstacle:
        notes.refuse(f"kernels.{key}", f"{asked} cannot run here: {obstacle}", f"set kernels.{key}: auto")
    if obstacle:
        return Choice(PLAIN, obstacle, "default")
    if asked == "auto":
        return Choice(fast, "the same up to rounding, which is checked before step 1", "default")
    return Choice(asked, "asked for", "user")


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
