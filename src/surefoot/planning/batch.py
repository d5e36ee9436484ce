"""Choose the micro-batch size, and whether gradient checkpointing is needed to fit into memory.

The optimizer step is the same for every choice made here; only speed and memory differ. Checkpointing costs about one
more forward pass, so it is the last resort: only if one example does not fit without it, or on request.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from surefoot.config.schema import BatchConfig
from surefoot.config.types import Count, Switch
from surefoot.planning import memory
from surefoot.planning.drawing import with_drawing
from surefoot.planning.measurements import LengthFacts, longest_example
from surefoot.planning.memory import Workload
from surefoot.planning.notes import Notes
from surefoot.planning.parallel import SINGLE, gathered_bytes, per_rank
from surefoot.planning.plan import BatchPlan, Choice, MemoryPlan, ParallelPlan
from surefoot.system.errors import NO_MEMORY
from surefoot.system.messages import size_text

# Tokens of a micro-batch beyond which more rows bring no speed, only memory. Measured on a CPU with 125 M parameters: 3
# 072 is as fast as 4 096 and takes a seventh less memory, 2 048 takes 8 % more time (docs/evidence/memory.md). A GPU is
# busy from a few thousand tokens on.
_BUSY = {"cpu": 3072, "mps": 8192, "cuda": 16384}

Recompute = tuple[Choice[bool], int | None]  # whether to checkpoint, and `MemoryPlan.recomputed`
Forecast = Callable[[int, Recompute], MemoryPlan]  # number of examples, checkpointing -> memory


def plan_batch(
    request: BatchConfig,
    checkpointing: Switch | Count,
    work: Workload,
    *,
    length: int,
    lengths: LengthFacts | None,
    kind: str,
    available: int,
    host: int | None = None,
    notes: Notes,
    parallel: ParallelPlan = SINGLE,
    documents: bool = False,
    experts_frozen: Workload | None = None,
) -> tuple[BatchPlan, MemoryPlan]:
    """Choose the rows of a micro-batch and gradient checkpointing, and forecast the memory they take.

    length: tokens of the longest example that the run may see.
    kind: cpu | cuda | mps.
    available: bytes of memory of one rank.
    host: bytes of host memory of one rank, if the device has memory of its own; None: unknown.
    documents: whether micro-batches may be counted in tokens.
    experts_frozen: the same workload without the adapter on a mixture's experts, if there is one.

    The examples of a step are divided among all ranks; the forecast is for one.
    """
    world = parallel.ranks.value
    longest = longest_example(length, lengths)
    count = examples_of_step(request, lengths.mean if lengths else longest)

    if isinstance(checkpointing, int) and checkpointing > work.model.layers:
        what = f"{checkpointing} layers are to be recomputed, but the model has {work.model.layers}"
        notes.refuse("gradient_checkpointing", what, "lower it, or set it to on")

    gathered = gathered_bytes(work.model, work.precision, work.adapter)

    def forecast(examples: int, again: Recompute, of: Workload = work, length: int = longest) -> MemoryPlan:
        choice, recomputed = again
        share = lengths.supervised if lengths else 1.0
        whole = memory.forecast(
            of,
            examples=examples,
            length=length,
            supervised=share,
            checkpointing=choice,
            available=available,
            recomputed=recomputed,
            accumulation=_passes(count, examples, world),
        )
        update = replace(per_rank(whole, parallel, gathered, of.model.layers), host_available=host)
        return with_drawing(update, work, examples, world)

    def decide(examples: int, forecast: Forecast) -> Recompute:
        return _checkpointing(checkpointing, work.model.layers, examples, forecast)

    def warn(examples: int, again: Recompute) -> None:
        _warn(work, experts_frozen, partial(forecast, again=again), examples, longest, notes)

    asked, room = "size" in request.model_fields_set, request.row_tokens
    unit = f", in rows of {room} tokens" if room else ""
    size = Choice(request.size, f"{'asked for' if asked else 'the usual size'}{unit}", "user" if asked else "default")
    if request.micro == "auto":
        busy = _busy_examples(kind, lengths, work.rows)
        plan, needed = _automatic(size, count, decide, forecast, warn, busy, longest, world)
        if documents and lengths:
            plan = _in_tokens(plan, count, lengths, longest, work.rows, kind, world)
        return plan, needed
    choice = decide(request.micro, forecast)
    warn(request.micro, choice)
    return _batch(size, count, Choice(request.micro, "asked for", "user"), world), forecast(request.micro, choice)


def examples_of_step(request: BatchConfig, mean: float) -> int:
    """Return the examples of a step; with batch.row_tokens what full rows hold. mean: tokens of an example."""
    room = request.row_tokens
    return request.size if room is None else math.ceil(request.size * max(1.0, room / mean))


def _automatic(
    size: Choice[int],
    count: int,
    decide: Callable[[int, Forecast], Recompute],
    forecast: Forecast,
    warn: Callable[[int, Recompute], None],
    busy: int | None,
    longest: int,
    world: int,
) -> tuple[BatchPlan, MemoryPlan]:
    choice = decide(1, forecast)
    own = math.ceil(count / world)
    wanted = own if busy is None else min(own, busy)
    rows = _most(wanted, lambda examples: memory.fits(forecast(examples, choice)))
    examples = f"{rows} example{'s' if rows > 1 else ''} of {longest} tokens"
    if not memory.fits(forecast(rows, choice)):
        reason = "the minimum; even one example may not fit into memory"
    elif rows == own:
        reason = f"a whole optimizer step fits: {examples}" + (" in each rank" if world > 1 else "")
    elif rows == wanted:
        reason = f"more than {rows} rows of this data would not use the device better"
    else:
        reason = f"{examples} fit into memory" if rows > 1 else f"{examples} fits into memory"
    # The same number of micro-batches of even size: 16 as 6 + 5 + 5 rather than 7 + 7 + 2.
    micro = math.ceil(own / math.ceil(own / rows))
    warn(micro, choice)
    return _batch(size, count, Choice(micro, reason, "hardware"), world), forecast(micro, choice)


def _in_tokens(
    plan: BatchPlan, count: int, lengths: LengthFacts, longest: int, rows: int, kind: str, world: int
) -> BatchPlan:
    """Limit micro-batches by tokens instead of rows: as many as fit by the forecast, up to what keeps the device busy,
    so that micro-batches of short examples hold more. count: examples of a step. rows: rows of an example."""
    one = rows * longest
    tokens = max(one, min(plan.micro.value * one, _BUSY[kind]))
    rows = max(1, math.ceil(count * rows * lengths.mean / tokens))
    return replace(plan, tokens=tokens, accumulation=math.ceil(rows / world))


def _most(limit: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number from 1 to `limit` that fits; 1 if none does."""
    if fits(limit):  # the whole step at once needs less than parts of it, between which gradients are kept
        return limit
    # Bisection: memory grows with the number of examples.
    low, high = 1, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _busy_examples(kind: str, lengths: LengthFacts | None, rows: int) -> int | None:
    """Number of examples that keep the device busy; None if their lengths are unknown. rows: rows of an example."""
    return None if lengths is None else max(1, _BUSY[kind] // (lengths.typical * rows))


def _checkpointing(request: Switch | Count, layers: int, examples: int, forecast: Forecast) -> Recompute:
    """Choose the number of checkpointed layers: as few as needed, because each costs its forward pass again."""
    if isinstance(request, int):
        return Choice(True, f"asked for: in the first {request} of {layers} layers", "user"), request
    if request != "auto":
        return Choice(request == "on", "asked for", "user"), None
    without = Choice(False, "activations fit, and recomputing them costs about a third more time", "hardware")
    plan = forecast(examples, (without, None))
    if memory.fits(plan):
        return without, None
    room = size_text(memory.usable(plan.available))
    reason = f"without it {examples} x the longest example would need {size_text(plan.total)} of {room}"
    # As few as needed, from the front: each costs its forward pass again, and the first layers come last in the
    # backward pass, when the activations of the others are freed.
    for again in range(1, layers):
        choice = Choice(True, f"in the first {again} of {layers} layers: {reason}", "hardware")
        if memory.fits(forecast(examples, (choice, again))):
            return choice, again
    return Choice(True, reason, "hardware"), None


def _warn(
    work: Workload,
    experts_frozen: Workload | None,
    forecast: Callable[..., MemoryPlan],
    micro: int,
    longest: int,
    notes: Notes,
) -> None:
    """Refuse a run that is larger than the whole memory even without a token, because that is exact; only warn about
    what exceeds the usable part of it.

    experts_frozen: the same workload with a mixture's experts frozen, if that is an option.
    forecast: of a number of examples, and if given a workload (`of`), a length, and checkpointing (`again`).
    """
    plan = forecast(micro)
    if plan.host_available is not None and plan.host > plan.host_available:
        what = f"needs {size_text(plan.host)} of host memory, but there are {size_text(plan.host_available)}"
        of_ahead = plan.host == plan.host_ahead
        smaller = ["set optim.name: adamw_8bit"] * (not of_ahead) + ["train an adapter"] * (work.adapter is None)
        fix = ", ".join([*smaller, "or leave it out"]) if smaller else "leave it out"
        notes.refuse("grpo.ahead" if of_ahead else "parallel.offload", what, fix, NO_MEMORY)
    elif not memory.fits_host(plan):
        room = f"{size_text(memory.usable(plan.host_available or 0))} usable of {size_text(plan.host_available or 0)}"
        advice = "train an adapter, or set " if work.adapter is None else "set "
        advice += "grpo.ahead: 0" if plan.host_ahead else "optim.name: adamw_8bit"
        notes.caution(f"{size_text(plan.host)} of host memory exceed the {room}; if the host runs out, {advice}")
    if memory.fits(plan):
        return

    def least(of: Workload) -> MemoryPlan:
        """What is needed at any length. (In one pass a step may need less than in several; pictures count per row.)"""
        again = Choice(True, "", "default"), None  # PEFT's DoRA keeps matrices for each layer otherwise
        return min((forecast(rows, of=of, length=0, again=again) for rows in (1, micro)), key=lambda one: one.total)

    room = f"{size_text(memory.usable(plan.available))} usable of {size_text(plan.available)}"
    needed = least(work)
    if needed.total > plan.available:
        parts, there = "weights, gradients and optimizer", size_text(plan.available)
        what = f"{parts} need {size_text(needed.total)} in micro-batches of any length, but there are {there}"
        if work.adapter and work.precision.base.value == "fp32":
            what += f"; the base is in fp32 ({work.precision.compute.reason})"
        fix = _smaller(work, lambda of: memory.fits(least(of)))
        if experts_frozen and (lighter := least(experts_frozen)).total <= plan.available:
            fix = f"set adapter.experts: false, which needs {size_text(lighter.total)}, or use a smaller model"
        notes.refuse("model", what, fix, NO_MEMORY)
        return
    lowered = {"batch.micro": forecast(1), "data.max_length": forecast(micro, length=0)}
    lower = [key for key, one in lowered.items() if memory.fits(one)]
    if not memory.fits(needed):
        advice = f"take other settings: micro-batches of any length need {size_text(needed.total)}"
    elif lower or plan.gradient_checkpointing.value:
        advice = f"lower {' or '.join(lower) or 'batch.micro and data.max_length'}"
    else:
        advice = "set gradient_checkpointing: on"
    if experts_frozen and memory.fits(lighter := forecast(micro, of=experts_frozen)):
        advice += f", or set adapter.experts: false, which needs {size_text(lighter.total)}"
    whole = f"the forecast of {size_text(plan.total)} for {micro} x {longest} tokens"
    notes.caution(f"{whole} exceeds the {room}; if memory runs out, {advice}")


def _smaller(work: Workload, fits: Callable[[Workload], bool]) -> str:
    """What makes weights, gradients and optimizer smaller. fits: whether those of a workload do."""
    if work.adapter is None:
        return "train an adapter, or use a smaller model"
    precision = work.precision
    half = replace(precision, compute=replace(precision.compute, value="bf16"), base=Choice("bf16", "", "default"))
    others = {"16": half, "4": replace(precision, base=Choice("nf4", "", "default"))}
    bits = [name for name, one in others.items() if one.base != precision.base and fits(replace(work, precision=one))]
    return f"keep the base in {' or '.join(bits)} bits, or use a smaller model" if bits else "use a smaller model"


def _batch(size: Choice[int], count: int, micro: Choice[int], world: int) -> BatchPlan:
    return BatchPlan(size, micro, _passes(count, micro.value, world))


def _passes(size: int, micro: int, world: int) -> int:
    """Forward passes per rank and step."""
    return math.ceil(math.ceil(size / micro) / world)
