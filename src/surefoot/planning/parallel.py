"""Choose the engine of a multi-process run, and compute what each rank stores of the memory forecast.

single      one process; its optimizer may lie in host memory (`surefoot.training.engine.offloaded`)
ddp         everything in every process: the least communication, so it is used whenever it fits
fsdp2       weights, gradients and optimizer state are sharded over all ranks
deepspeed   ZeRO 1: optimizer state; 2: also gradients; 3: also weights
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from surefoot.config.schema import OptimConfig
from surefoot.config.sections import ParallelConfig
from surefoot.families.model_facts import ModelFacts
from surefoot.planning import memory
from surefoot.planning.notes import Notes
from surefoot.planning.optimizer import trainable_tensors
from surefoot.planning.plan import OFF, AdapterPlan, Choice, MemoryPlan, ParallelPlan, PrecisionPlan
from surefoot.planning.workload import BYTES, Workload
from surefoot.system.messages import GIB, size_text

SINGLE = ParallelPlan()
ELEMENTWISE = ("adamw", "rmsprop", "sgd")  # optimizers that update each element independently


@dataclass(frozen=True)
class RanksFacts:
    """The processes of a run.

    world: number of processes.
    local: number of processes on one machine, which share its host memory.
    requested: whether the config requests them; else a launcher does.
    """

    world: int = 1
    local: int = 1
    requested: bool = False


ONE_RANK = RanksFacts()


def plan_parallel(request: ParallelConfig, ranks: RanksFacts, states: MemoryPlan, notes: Notes) -> ParallelPlan:
    """Choose engine and ranks. states: forecast of weights, gradients and optimizer state in one process, with the
    available memory of one."""
    count = Choice(
        ranks.world,
        "asked for" if ranks.requested else "as many as the launcher started" if ranks.world > 1 else "no launcher",
        "user" if ranks.requested or ranks.world > 1 else "default",
    )
    stage = request.zero_stage if request.engine == "deepspeed" else None
    if request.engine == "single" and ranks.world > 1:
        what = f"single is one process, but there are {ranks.world}"
        notes.refuse("parallel.engine", what, "leave it out, or use ddp, fsdp2 or deepspeed")
    alone = request.engine == "single" or (request.engine == "auto" and ranks.world == 1)
    if request.offload != "none" and not alone and request.engine not in ("fsdp2", "deepspeed"):
        what = f"in several processes only fsdp2 and deepspeed keep state in host memory, not {request.engine}"
        notes.refuse("parallel.offload", what, "set parallel.engine: fsdp2, or leave it out")
    if request.offload == "all" and alone:
        what = "one process needs its weights on its device"
        notes.refuse("parallel.offload", what, "set optimizer")
    if request.engine == "fsdp2" and request.offload == "optimizer":
        what = "fsdp2 keeps weights, gradients and moments in the same place"
        notes.refuse("parallel.offload", what, "set all, or parallel.engine: deepspeed")
    if request.engine == "deepspeed" and request.offload == "all" and request.zero_stage < 3:
        what = f"ZeRO {request.zero_stage} keeps all weights on every device"
        notes.refuse("parallel.offload", what, "set optimizer, or parallel.zero_stage: 3")
    if request.engine != "auto":
        reason = f"asked for; {shared_words(request.engine, stage, ranks.world)}"
        return ParallelPlan(Choice(request.engine, reason, "user"), count, stage, request.offload)
    if ranks.world == 1:
        return ParallelPlan(Choice("single", "one process", "default"), count, offload=request.offload)
    size = size_text(states.weights + states.gradients + states.optimizer)
    room = size_text(memory.usable(states.available))
    if memory.fits(states):
        reason = f"weights, gradients and optimizer state, {size}, fit into {room}: every rank holds all of them"
        return ParallelPlan(Choice("ddp", reason, "hardware"), count)
    reason = (
        f"weights, gradients and optimizer state, {size}, exceed {room}; {shared_words('fsdp2', None, ranks.world)}"
    )
    return ParallelPlan(Choice("fsdp2", reason, "hardware"), count)


def check_shareable(plan: ParallelPlan, optimizer: str, packed: bool, notes: Notes) -> None:
    """Refuse an optimizer or a base that an engine cannot shard.

    optimizer: its name.
    packed: whether the base is quantized.
    """
    engine = plan.engine.value
    if engine not in ("fsdp2", "deepspeed"):
        return
    if optimizer not in ELEMENTWISE:
        what = f"{optimizer} needs whole matrices or blocks, but {engine} shards them"
        notes.refuse("optim.name", what, f"use {' or '.join(ELEMENTWISE)}, or parallel.engine: ddp")
    if packed:
        what = f"{engine} cannot shard a quantized base"
        notes.refuse("parallel.engine", what, "use ddp, or precision.base: auto")


def holds_narrow(plan: ParallelPlan, precision: PrecisionPlan, adapter: AdapterPlan | None) -> bool:
    """Whether the device holds the decoder's linear weights in the dtype of the products, because the fp32 ones lie in
    host memory. Adapters stay in fp32, and so do weights whose rounding is trained (precision.qat)."""
    alone = plan.engine.value == "single" and plan.offload == "optimizer"
    return alone and adapter is None and precision.compute.value != "fp32" and precision.qat.value == OFF


def with_offload(
    work: Workload, parallel: ParallelPlan, optim: OptimConfig, model: ModelFacts, added_rows: int
) -> Workload:
    """Return the workload of a process whose optimizer lies in host memory, if the plan says so.

    model: as trained, as for `trainable_tensors`.
    """
    if parallel.engine.value != "single" or parallel.offload == "none":
        return work
    narrow = 0
    if holds_narrow(parallel, work.precision, work.adapter):
        narrow = sum(one.linear[0] * one.linear[1] for one in model.modules if one.in_layer and one.linear)
    width = work.width if narrow else 4
    tensors = trainable_tensors(model, work.adapter, added_rows)
    largest = max((tensor.numbers * (width if tensor.inside else 4) for tensor in tensors), default=0)
    return replace(work, offloaded=True, narrow=narrow, largest=largest)


def check_average(plan: ParallelPlan, decay: float | None, notes: Notes) -> None:
    """Refuse a moving average of sharded weights, which needs them whole on every rank, and of weights in two places.
    decay: ppo.ema."""
    engine, stage = plan.engine.value, plan.zero_stage
    if decay is not None and engine == "single" and plan.offload != "none":
        what = "an average of weights is put into the model, and parallel.offload has the ones that train elsewhere"
        notes.refuse("ppo.ema", what, "leave one of them out")
    if decay is None or "weights" not in shared_parts(engine, stage):
        return
    named = f"parallel.engine {engine}" + (f" with parallel.zero_stage {stage}" if stage else "")
    what = f"an average needs unsharded weights, but {named} shards them"
    notes.refuse("ppo.ema", what, "remove ppo.ema, or set parallel.engine: ddp, or deepspeed with zero_stage 1 or 2")


def check_server(plan: ParallelPlan, rollouts: str, key: str, notes: Notes) -> None:
    """Refuse a vLLM server with several ranks: one process sends it the weights. rollouts: the engine, the value of
    `key`."""
    if rollouts == "vllm" and plan.ranks.value > 1:
        what = f"a vLLM server needs one process to send the weights, but there are {plan.ranks.value}"
        notes.refuse(key, what, "use embedded, or one process")


def caution_loading(plan: ParallelPlan, ranks: RanksFacts, loaded: int, notes: Notes) -> None:
    """Caution about host memory. loaded: bytes of all weights, which each rank reads before it keeps its shard."""
    if ranks.world == 1 or not sharder(plan) or ranks.local * loaded < GIB:
        return
    each, together = size_text(loaded), size_text(ranks.local * loaded)
    who = f"each of {ranks.local} ranks on a machine reads" if ranks.local > 1 else "each rank reads"
    notes.caution(f"{who} all weights, {each}, into host memory before it keeps its shard: {together} in all at first")


def shared_words(engine: str, stage: int | None, world: int) -> str:
    """Describe what is sharded."""
    parts = [name for name in ("weights", "gradients", "optimizer") if name in shared_parts(engine, stage)]
    if not parts or world == 1:
        return "every rank holds everything" if world > 1 else "one rank holds everything"
    listed = ", ".join(part if part != "optimizer" else "optimizer state" for part in parts)
    return f"each of {world} ranks holds a share of: {listed}"


def shared_parts(engine: str, stage: int | None) -> frozenset[str]:
    """Return which of weights, gradients and optimizer state are sharded."""
    if engine == "fsdp2":
        return frozenset({"weights", "gradients", "optimizer"})
    if engine == "deepspeed":
        return frozenset(("optimizer", "gradients", "weights")[: stage or 1])
    return frozenset()


def sharder(plan: ParallelPlan) -> str:
    """Return the engine if it shards weights, which are then whole only during a module's own forward; else empty."""
    engine = plan.engine.value
    return engine if "weights" in shared_parts(engine, plan.zero_stage) else ""


# Layers that are whole at a time: the one that computes, and the one that is fetched ahead.
_GATHERED = 2
# Most bytes of each of the two buffers of ZeRO 3 in which gradients are reduced and weights are fetched.
_ZERO_BUFFER = 2 * 10**9


def per_rank(whole: MemoryPlan, plan: ParallelPlan, gathered: int, layers: int) -> MemoryPlan:
    """Forecast of one rank; what is offloaded to host memory does not count. Activations are not sharded.

    gathered: see `gathered_bytes`.
    layers: number of layers of the model.
    """
    parts, world = shared_parts(plan.engine.value, plan.zero_stage), plan.ranks.value

    def share(part: str, size: int) -> int:
        return math.ceil(size / world) if part in parts else size

    cast = whole.cast
    if "weights" in parts:
        if plan.zero_stage == 3:
            gathered += 2 * min(whole.gradients, _ZERO_BUFFER)
        # Copies of whole weights: autograd keeps those of layers that are not computed again.
        cast = cast * (layers - whole.layers_again(layers)) // layers
    found = replace(
        whole,
        weights=share("weights", whole.weights - whole.cast) + cast,
        cast=cast,
        gathered=gathered if "weights" in parts else 0,
        gradients=share("gradients", whole.gradients),
        optimizer=share("optimizer", whole.optimizer),
        # Shares of gradients come while casts of whole weights go. Other shares hardly matter: err on the safe side.
        apart=min(whole.apart, cast if "weights" in parts else 0) if "gradients" in parts else whole.apart,
    )
    if plan.offload == "none" or plan.engine.value == "single":  # `memory.forecast` has a single process as it is
        return found
    # Each keeps fp32 weights that train, their gradients and moments there.
    masters = share("optimizer", whole.gradients)
    kept = found.weights - cast if plan.offload == "all" else 0
    host = whole.host + masters + found.gradients + found.optimizer + kept
    return replace(found, optimizer=0, weights=found.weights - kept, host=host)


def frees_casts(plan: ParallelPlan, memory: MemoryPlan) -> bool:
    """Whether casts of weights are freed after their product. Autocast's cache would keep those of all layers, whole,
    until the forward pass ends; layers that are not computed again keep theirs for the backward pass anyway."""
    return bool(sharder(plan)) and memory.gradient_checkpointing.value


def gathered_bytes(model: ModelFacts, precision: PrecisionPlan, adapter: AdapterPlan | None) -> int:
    """Bytes that each rank has whole at a time where an engine shards weights: decoder layers, and the embeddings and
    head, which stay until the backward pass reaches them again."""
    each = 4 if adapter is None else BYTES[precision.unpacked]
    inside = each * sum(module.parameters for module in model.modules if module.in_layer)
    layer, rest = inside // model.layers, each * model.parameters - inside
    if adapter is not None:
        return _GATHERED * layer + rest
    # Also the gradients: of a layer with the copy that is reduced, of the rest that of the head.
    return (_GATHERED + 2) * layer + rest + rest // 2
