"""Timed forward and backward passes of a prepared run, and timed comparisons. The weights do not change."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.loader import own_batches
from surefoot.data.batching.prefetch import prefetched
from surefoot.methods.table import functions_of
from surefoot.models.attention import attention_context, observe_kernels
from surefoot.models.modes import eager_mode
from surefoot.models.product_flops import ProductFlops
from surefoot.planning.plan import Choice, SdpaKernel
from surefoot.runs.parity.passes import with_stand_ins
from surefoot.runs.trial import Ready
from surefoot.training.profile import Stopwatch, Watch, unwatched
from surefoot.training.step import StepSettings, add_gradient, draw_number, seed_micro_batch

_ROUNDS, _MOST_ROUNDS = 3, 8  # rounds of a comparison
_ALIKE = 1.05  # a time within this factor of the best confirms it
_STEPS = 3  # steps whose batches are prepared to judge workers


def take_pass(one: Ready, batch: Weighted | None = None) -> None:
    """Run forward and backward of `batch` (default: the first step's longest micro-batch)."""
    _pass(one, batch, None, unwatched)


@dataclass(frozen=True)
class Observed:
    """Observations of one pass. kernels: attention kernels that ran. products: their arithmetic, by type and module."""

    kernels: Collection[str]
    products: ProductFlops


def observed_pass(one: Ready) -> Observed:
    """Run one micro-batch forward and backward and record every dispatched operator."""
    with ProductFlops() as products:
        kernels = observe_kernels(lambda: take_pass(one))
    return Observed(frozenset(kernels), products)


def pass_seconds(one: Ready, batch: Weighted | None = None, settings: StepSettings | None = None) -> float:
    """Duration of `take_pass` with `settings` (default: the run's); synchronizes with a GPU before and after."""
    watch = Stopwatch(one.loaded.engine.device)
    _pass(one, batch, settings, watch)
    profile = watch.profile(1)
    return (profile.forward_ms + profile.backward_ms) / 1000


def _pass(one: Ready, batch: Weighted | None, settings: StepSettings | None, watch: Watch) -> None:
    loaded, task = one.loaded, one.run.task
    engine, settings = loaded.engine, settings or loaded.settings
    objective, batch = with_stand_ins(task.objective, batch or task.step_batches(1)[0], engine.device, loaded.plan)
    seed_micro_batch(settings.seed, 1, draw_number(engine, 0))
    try:
        weight, scale = max(batch.weight, 1), loaded.state.scale
        add_gradient(engine, objective, batch, weight=weight, scale=scale, settings=settings, watch=watch)
    finally:
        engine.discard()


def compared(before: Callable[[], float], after: Callable[[], float]) -> float:
    """Return best time before divided by best time after. The two alternate after one warm-up each, until a second time
    confirms each best: next to other programs a single undisturbed pass could decide."""
    # The first run of each is slower: caches, allocators, compilation.
    for run in (before, after):
        run()
    ways: tuple[list[float], list[float]] = [], []
    while len(ways[0]) < _MOST_ROUNDS and not all(map(_is_borne_out, ways)):
        for times, run in zip(ways, (before, after), strict=True):
            times.append(run())
    return min(ways[0]) / min(ways[1])


def _is_borne_out(times: Sequence[float]) -> bool:
    """Whether a second time confirms the best one. times: seconds."""
    return len(times) >= _ROUNDS and sorted(times)[1] <= _ALIKE * min(times)


def gain_of_kernel(one: Ready, kernel: SdpaKernel) -> float:
    """Gain of another SDPA kernel over the run's. If it does not support the model, for example its dropout, torch uses
    the math kernel."""
    other = replace(one.loaded.plan.attention, kernels=Choice((kernel, "math"), "", "measured"))
    changed = replace(one.loaded.settings, kernels=lambda: attention_context(other))
    return compared(lambda: pass_seconds(one), lambda: pass_seconds(one, settings=changed))


def gain_of_eager(one: Ready) -> float:
    """Gain of a pass without torch.compile."""

    def eager() -> float:
        with eager_mode(one.loaded.engine.model):
            return pass_seconds(one)

    return compared(lambda: pass_seconds(one), eager)


def gain_of_micro(one: Ready, micro: int) -> float:
    """Gain per real token of micro-batches with this number of examples over the run's."""
    now, then = one.run.task.step_batches(1)[0], in_micro_batches(one, micro)[0]
    tokens = [sum(batch.rows.lengths) for batch in (now, then)]
    return compared(lambda: pass_seconds(one, now) / tokens[0], lambda: pass_seconds(one, then) / tokens[1])


def gain_without_workers(one: Ready, workers: int) -> float:
    """Gain of preparing batches on demand over preparing them ahead on threads."""

    def timed(threads: int) -> float:
        started = time.perf_counter()
        with prefetched(own_batches(one.run.task.step_batches), threads, last=_STEPS) as batches:
            for step in range(1, _STEPS + 1):
                take_pass(one, batches(step)[0])
        return time.perf_counter() - started

    return compared(lambda: timed(workers), lambda: timed(0))


def in_micro_batches(one: Ready, micro: int) -> Sequence[Weighted]:
    """The first step's micro-batches with this number of examples each, packed if the run packs."""
    run = one.run
    batch = replace(run.plan.batch, micro=replace(run.plan.batch.micro, value=micro), tokens=None)
    return (
        functions_of(run.config.stage).task(run.config, replace(run.plan, batch=batch), run.task.data).step_batches(1)
    )
