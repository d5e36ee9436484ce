"""Ten real steps of the run, on its own data and weights, with everything that can go wrong in them looked at.

They are taken at the peak of the learning rate from the first step on, because a warm-up would hide what the run meets
later, and over a few micro-batches of each step, because ten whole ones may take an hour.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from surefoot.data.batch import Weighted
from surefoot.doctor.codes import BACKWARD, FP32, NEAR, WAIT
from surefoot.doctor.findings import Finding, caution, fault, ok
from surefoot.models.attention import attention_context, observe_kernels
from surefoot.models.product_flops import ProductFlops
from surefoot.planning.measurements import Measurements
from surefoot.planning.plan import Choice, RunPlan, SdpaKernel
from surefoot.stages.job import make_schedules
from surefoot.stages.rehearsal import rehearsal
from surefoot.stages.trial import Ready
from surefoot.training.profile import Stopwatch, Watch, unwatched
from surefoot.training.report import StepReport
from surefoot.training.scaling import LossScale
from surefoot.training.step import StepSettings, add_gradient, draw, train_step

STEPS = 10
MICRO_BATCHES = 2  # of a step
WARM_UP = 3  # steps after which nothing new should have to be compiled
_ROUNDS = 3  # of an A/B comparison
_NORMS = (1e-6, 1e4)
_SHOWN = 3  # modules


@dataclass(frozen=True)
class Taken:
    """What ten steps showed. reports: with a profile each. again: the first step's loss after all of them. waiting:
    seconds until a step's batches were there, from the second step on. compiled: graphs that torch compiled up to each
    step. preparing: seconds in which one thread prepares a step's batches. whole: seconds that a whole step would take,
    of which only some micro-batches were computed."""

    reports: Sequence[StepReport]
    again: float | None
    waiting: float
    preparing: float
    whole: float
    compiled: Sequence[int]


def take(one: Ready) -> Taken:
    """The weights move, and nobody keeps them."""
    stage, state = one.run.stage, one.setup.state
    reports, waits, parts, compiled = [], [], [], []
    for number in range(1, STEPS + 1):
        started = time.perf_counter()
        found = one.batches(number)
        waits.append(time.perf_counter() - started)
        found = found if stage.ready is None else stage.ready(number, found)
        some = few(found)
        parts.append(len(some) / len(found))
        report = _step(one, number, some, state.scale, moving=True)
        state = state.after_step(report)
        reports.append(report)
        compiled.append(_graphs())
    started = time.perf_counter()
    stage.step_batches(1)
    preparing = time.perf_counter() - started
    again = _step(one, 1, few(stage.batches(1)), state.scale, moving=False)
    whole = statistics.median(report.seconds / part for report, part in zip(reports[1:], parts[1:], strict=True))
    return Taken(reports, again.loss, statistics.median(waits[1:]), preparing, whole, compiled)


def few(batches: Sequence[Weighted]) -> Sequence[Weighted]:
    """The longest micro-batch of a step, and others at even distances."""
    count = min(MICRO_BATCHES, len(batches))
    return [batches[place * (len(batches) - 1) // max(1, count - 1)] for place in range(count)]


def _step(one: Ready, number: int, batches: Sequence[Weighted], scale: LossScale | None, *, moving: bool) -> StepReport:
    """moving=False: the same draws and the same loss, at a rate of 0."""
    stage, setup = one.run.stage, one.setup
    schedules = make_schedules(one.run.config, stage, one.run.timetable, setup.engine.groups)
    return train_step(
        setup.engine,
        stage.objective,
        batches,
        step=number,
        lr={name: schedule.peak if moving else 0.0 for name, schedule in schedules.items()},
        scale=scale,
        settings=replace(setup.settings, bounds=stage.bounds),
        watch=Stopwatch(setup.engine.device),
    )


def _graphs() -> int:
    """That torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def number_lines(taken: Taken, *, falls: bool) -> list[Finding]:
    """Loss and gradients. falls: whether the loss of the first step's examples is one that learning lowers."""
    bad = [report for report in taken.reports if report.decision == "non_finite"]
    if bad:
        first = bad[0]
        what = f"the {(first.non_finite or '').replace('_', ' ')} of step {first.step} is not finite"
        examples = ", ".join(map(str, first.examples[:4]))
        return [fault("LOSS-FINITE", f"{what} (examples {examples})", "set precision: fp32, or lower optim.lr")]
    lines = [ok("LOSS-FINITE", f"{len(taken.reports)} steps")]
    losses = [report.loss for report in taken.reports if report.loss is not None]
    norms = [report.grad_norm for report in taken.reports if report.grad_norm is not None]
    if falls and losses and losses[0] == 0:
        return [*lines, fault("LOSS-ZERO", "0", "look at the labels with `surefoot data`")]
    if losses:
        lines.append(ok("LOSS-ZERO", f"{losses[0]:.4g} at the first step"))
    if norms:
        outside = [norm for norm in norms if not _NORMS[0] <= norm <= _NORMS[1]]
        said = f"{min(norms):.3g} to {max(norms):.3g}"
        fix = "look at the examples of the largest loss, at optim.lr and at the base's weights"
        lines.append(caution("GRAD-NORM", said, fix) if outside else ok("GRAD-NORM", said))
    if falls and losses and taken.again is not None:
        said = f"{losses[0]:.4g} → {taken.again:.4g}"
        if taken.again < losses[0]:
            lines.append(ok("LOSS-FALLING", said))
        else:
            lines.append(caution("LOSS-FALLING", said, "lower optim.lr, or look at the labels with `surefoot data`"))
    return lines


def time_lines(taken: Taken, workers: int) -> list[Finding]:
    """Where the time goes. workers: threads that prepare batches."""
    watched = [report.profile for report in taken.reports[1:] if report.profile]
    forward = statistics.median(profile.forward_ms for profile in watched)
    backward = statistics.median(profile.backward_ms for profile in watched)
    ratio = backward / forward
    said = f"{ratio:.2f} ({forward:.3g} ms forward, {backward:.3g} ms backward for a micro-batch)"
    fix = "a lower batch.micro, attention: auto and compile: off are what has cured it; see the other lines"
    lines = [caution("BWD-RATIO", said, fix) if ratio > BACKWARD else ok("BWD-RATIO", said)]
    share = taken.waiting / (taken.waiting + taken.whole)
    own = taken.preparing / (taken.preparing + taken.whole)
    said = f"{share:.1%} of a step"
    if share > WAIT:
        gain = (taken.waiting + taken.whole) / taken.whole
        fix = "data.workers: 1 prepares coming steps meanwhile" if not workers else "put the cache on a faster disk"
        lines.append(caution("DATA-WAIT", said, fix, gain=gain))
    else:
        lines.append(ok("DATA-WAIT", said))
    if workers and own <= WAIT:
        said = f"{workers}, for batches that take {own:.1%} of a step"
        lines.append(caution("WORKERS-USELESS", said, "set data.workers: 0"))
    else:
        lines.append(ok("WORKERS-USELESS", f"{workers}"))
    return lines


def compile_line(taken: Taken, plan: RunPlan, one: Ready) -> Finding:
    late = taken.compiled[-1] - taken.compiled[WARM_UP - 1]
    if plan.compile.value == "off" and not late:
        return ok("COMPILE-RECOMPILES", "compile is off")
    said = f"{late} in steps {WARM_UP + 1} to {len(taken.compiled)}"
    if not late:
        return ok("COMPILE-RECOMPILES", said)

    def eager() -> float:
        with torch.compiler.set_stance("force_eager"):
            return _seconds(one, one.setup.settings)

    gain = compared(lambda: _seconds(one, one.setup.settings), eager)
    return caution("COMPILE-RECOMPILES", said, "set compile: off: lengths differ from step to step", gain=gain)


def product_line(one: Ready, compute: str, measured: Measurements) -> Finding:
    """One micro-batch forward and backward, dispatch by dispatch."""
    with ProductFlops() as seen:
        _pass(one, one.setup.settings)
    share = seen.share("fp32")
    if compute == "fp32" or share <= FP32:
        said = "an fp32 run" if compute == "fp32" else f"{share:.1%}"
        return ok("GEMM-FP32-SHARE", said)
    where = ", ".join(f"{name} {part:.0%}" for name, part in seen.modules("fp32")[:_SHOWN])
    rates = measured.products
    gain = None
    if compute in rates and "fp32" in rates:  # Amdahl's law over the products alone
        faster = rates[compute] / rates["fp32"]  # type: ignore[index]
        gain = (share * faster + 1 - share) if faster > 1 else None
    fix = "let these modules run under autocast: no .float() and no autocast(enabled=False) around their products"
    return caution("GEMM-FP32-SHARE", f"{share:.0%}, in {where}", fix, gain=gain)


def attention_line(one: Ready, plan: RunPlan, measured: Measurements) -> Finding:
    """Which kernel runs, and whether one that keeps no score would be faster. Storing every score costs memory and
    traffic that grow with the square of the length."""
    seen = observe_kernels(lambda: _pass(one, one.setup.settings))
    said = ", ".join(sorted(seen)) or "none"
    fused = [
        trial for trial in measured.attention if trial.passed and trial.form in ("flash", "mem_efficient", "cudnn")
    ]
    if not seen & {"math", "eager"} or not fused:
        return ok("ATTN-MATH", said)
    best = min(fused, key=lambda trial: trial.seconds)
    mine = [trial.seconds for trial in measured.attention if trial.form in seen and trial.passed]
    if mine and min(mine) < NEAR * best.seconds:
        return ok("ATTN-MATH", f"{said}; {best.form} is no faster at these lengths")
    if plan.attention.implementation.value == "sdpa":
        gain = _with_kernel(one, plan, best.form)
    else:
        gain = min(mine) / best.seconds if mine else None
    value = f"{said} runs, and {best.form} is right and faster at these lengths"
    return caution("ATTN-MATH", value, "set attention: auto", gain=gain)


def compared(before: Callable[[], float], after: Callable[[], float]) -> float:
    """Best time before over best time after, taken in turns after one run of each that is not counted."""
    for run in (before, after):
        run()
    times = [(before(), after()) for _ in range(_ROUNDS)]
    return min(one for one, _ in times) / min(other for _, other in times)


def _with_kernel(one: Ready, plan: RunPlan, kernel: str) -> float:
    """Time of a pass as the run has it over that with another kernel of SDPA."""
    chosen: tuple[SdpaKernel, ...] = (kernel,)  # type: ignore[assignment]
    other = replace(plan.attention, kernels=Choice(chosen, "", "measured"))
    now = one.setup.settings
    changed = replace(now, kernels=lambda: attention_context(other))
    return compared(lambda: _seconds(one, now), lambda: _seconds(one, changed))


def _seconds(one: Ready, settings: StepSettings) -> float:
    watch = Stopwatch(one.setup.engine.device)
    _pass(one, settings, watch)
    profile = watch.profile(1)
    return profile.forward_ms + profile.backward_ms


def _pass(one: Ready, settings: StepSettings, watch: Watch = unwatched) -> None:
    """Forward and backward of the first step's longest micro-batch; the weights stay."""
    setup, stage = one.setup, one.run.stage
    engine = setup.engine
    objective, batch = rehearsal(stage.objective, stage.step_batches(1)[0], engine.device, setup.plan)
    draw(engine, settings, 1, 0)
    try:
        weight, scale = max(batch.weight, 1), one.setup.state.scale
        add_gradient(engine, objective, batch, weight=weight, scale=scale, settings=settings, watch=watch)
    finally:
        engine.discard()
