"""Ten real steps of the run, on its own data and weights: problems in them, and where their time goes.

All use the peak learning rate, because a warm-up would hide later problems, and a few micro-batches of each step,
because ten whole steps may take an hour. Every remedy for lost time is tried before it is suggested. `check_steps` is
`surefoot train --check N`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from surefoot.commands.doctor.findings import BACKWARD, FP32, NEAR, WAIT, Finding, caution, fault, ok
from surefoot.commands.doctor.passes import Observed, gain_of_eager, gain_of_kernel, gain_of_micro, gain_without_workers
from surefoot.config.schema import RunConfig
from surefoot.config.sections import ParallelConfig
from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.loader import own_batches
from surefoot.planning.measurements import AttentionTrial, Measurements
from surefoot.planning.plan import DType, RunPlan, SdpaKernel
from surefoot.report.library_messages import captured_libraries
from surefoot.report.observer import silent_console
from surefoot.report.wording import number
from surefoot.runs.trial import Ready, ready
from surefoot.training.profile import Stopwatch
from surefoot.training.report import StepReport
from surefoot.training.state import LossScale

STEPS = 10
MICRO_BATCHES = 2  # computed per step
_ENOUGH, _PATIENCE = 4, 240.0  # steps always taken, and seconds after which no more are started
_TURNS, _TURNS_ENOUGH = 5, 1.0  # repetitions of preparing a step's batches, and seconds after which no more are started
_NORMS = (1e-6, 1e4)
_SHOWN = 3  # modules named


@dataclass(frozen=True)
class Taken:
    """The results of ten steps, or of fewer if they are very slow.

    reports: each with a profile.
    again: the first step's loss after all of them.
    waiting: seconds spent waiting for batches, from the second step on.
    compiled: number of graphs that torch has compiled up to each step.
    preparing: seconds in which one undisturbed thread prepares a step's batches.
    whole: seconds of a whole step, extrapolated from the computed micro-batches.
    """

    reports: Sequence[StepReport]
    again: float | None
    waiting: float
    preparing: float
    whole: float
    compiled: Sequence[int]


def take(one: Ready, steps: int = STEPS, on_step: Callable[[StepReport], None] = lambda report: None) -> Taken:
    """Take the steps; they change the weights in memory. on_step: called with the report of each."""
    task, state = one.run.task, one.loaded.state
    reports, waits, parts, compiled = [], [], [], []
    began = time.perf_counter()
    for step in range(1, steps + 1):
        if step > _ENOUGH and time.perf_counter() - began > _PATIENCE:
            break
        started = time.perf_counter()
        found = one.batches(step)
        waits.append(time.perf_counter() - started)
        found = found if task.ready is None else task.ready(step, found)
        some = few(found)
        parts.append(len(some) / len(found))
        report = _step(one, step, some, state.scale, moving=True)
        state = state.after_step(report)
        reports.append(report)
        on_step(report)
        compiled.append(_graphs())
    preparing = _undisturbed(lambda: own_batches(task.step_batches)(1))
    again = _step(one, 1, few(task.batches(1)), state.scale, moving=False)
    whole = statistics.median(report.seconds / part for report, part in zip(reports[1:], parts[1:], strict=True))
    return Taken(reports, again.loss, statistics.median(waits[1:]), preparing, whole, compiled)


def _undisturbed(work: Callable[[], object]) -> float:
    """Seconds of the fastest of a few repetitions: on a busy machine one may wait for a core longer than it works, and
    processor time would not include a slow disk."""
    seconds: list[float] = []
    while len(seconds) < _TURNS and sum(seconds) < _TURNS_ENOUGH:
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def few(batches: Sequence[Weighted]) -> Sequence[Weighted]:
    """The longest micro-batch of a step, and others, evenly spaced."""
    count = min(MICRO_BATCHES, len(batches))
    return [batches[place * (len(batches) - 1) // max(1, count - 1)] for place in range(count)]


def _step(one: Ready, number: int, batches: Sequence[Weighted], scale: LossScale | None, *, moving: bool) -> StepReport:
    """moving=False: the same random draws and loss, with learning rate 0."""
    watch = Stopwatch(one.loaded.engine.device)
    return one.step_at(number, batches, lambda schedule: schedule.peak if moving else 0.0, scale, watch)


def _graphs() -> int:
    """Number of graphs that torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def number_lines(taken: Taken, compute: DType, *, falls: bool) -> list[Finding]:
    """Findings about loss and gradients.

    compute: the type of products.
    falls: whether training should lower the loss of the first step's examples.
    """
    bad = [report for report in taken.reports if report.decision == "non_finite"]
    if bad:
        first = bad[0]
        what = f"the {(first.non_finite or '').replace('_', ' ')} of step {first.step} is not finite"
        examples = ", ".join(map(str, first.examples[:4]))
        wider = "" if compute == "fp32" else "set precision.compute: fp32, or "
        return [fault("LOSS-FINITE", f"{what} (examples {examples})", f"{wider}lower optim.lr")]
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
        fix = "check the examples with the largest loss, optim.lr and the base's weights"
        lines.append(caution("GRAD-NORM", said, fix) if outside else ok("GRAD-NORM", said))
    if falls and losses and taken.again is not None:
        said = f"{losses[0]:.4g} → {taken.again:.4g}"
        if taken.again < losses[0]:
            lines.append(ok("LOSS-FALLING", said))
        else:
            lines.append(caution("LOSS-FALLING", said, "lower optim.lr, or look at the labels with `surefoot data`"))
    return lines


def product_line(one: Ready, seen: Observed, compute: str, measured: Measurements) -> Finding:
    """Share of fp32 products. Those of torch's math attention kernel are left to `ATTN-MATH`, since no change of a
    module affects them."""
    its_own = _attention_names(one) if "math" in seen.kernels else set()
    modules = [(name, part) for name, part in seen.products.modules("fp32") if name.rpartition(".")[2] not in its_own]
    share = sum(part for _, part in modules)
    if compute == "fp32" or share <= FP32:
        said = "an fp32 run" if compute == "fp32" else f"{share:.1%}"
        return ok("GEMM-FP32-SHARE", said)
    where = ", ".join(f"{name} {part:.0%}" for name, part in modules[:_SHOWN])
    rates = measured.products
    gain = None
    if compute in rates and "fp32" in rates:  # Amdahl's law for the products only
        faster = rates[compute] / rates["fp32"]  # type: ignore[index]
        gain = (share * faster + 1 - share) if faster > 1 else None
    fix = "run these modules under autocast: no .float() and no autocast(enabled=False) around their products"
    return caution("GEMM-FP32-SHARE", f"{share:.0%}, in {where}", fix, gain=gain)


def _attention_names(one: Ready) -> set[str]:
    """Names of the layers' attention modules."""
    named = one.loaded.policy.named_modules()
    return {name.rpartition(".")[2] for name, module in named if type(module).__name__.endswith("Attention")}


_OWN_PRODUCTS = "matmul"  # packed attention that uses no SDPA kernel of torch
_STORING = ("math", "eager")  # attention that stores all scores
_FUSED: tuple[SdpaKernel, ...] = ("flash", "mem_efficient", "cudnn")
_WARM_UP = 3  # steps after which nothing should be compiled


def attention_line(one: Ready, seen: Observed, measured: Measurements) -> Finding:
    """Which kernel runs, and whether one that stores no scores would be faster. Scores cost memory and traffic
    quadratic in the length. A user's choice must be clearly faster to pass; the plan's choice must only not be clearly
    slower, because the plan had its reasons."""
    said = ", ".join(sorted(seen.kernels)) or "none"
    if one.plan.attention.implementation.source == "family":
        return ok("ATTN-MATH", f"{said}: no other kernel supports this model")
    if one.plan.kernels.documents.value == _OWN_PRODUCTS:
        return ok("ATTN-MATH", f"{said}: the measured choice for short documents in packed rows")
    best = _best_fused(measured)
    if not set(_STORING) & set(seen.kernels) or best is None:
        return ok("ATTN-MATH", said)
    requested = "user" in (one.plan.attention.implementation.source, one.plan.attention.kernels.source)
    mine = [trial.seconds for trial in measured.attention if trial.form in seen.kernels and trial.passed]
    if mine and min(mine) * (NEAR if requested else 1) < best.seconds * (1 if requested else NEAR):
        return ok("ATTN-MATH", f"{said}; {best.form} is no faster at these lengths")
    if one.plan.attention.implementation.value == "sdpa":
        gain = gain_of_kernel(one, best.form)  # type: ignore[arg-type]
    else:
        gain = min(mine) / best.seconds if mine else None
    slower = gain is not None and gain < NEAR
    if slower and not requested:  # the plan could choose, but for example dropout rules the others out
        return ok("ATTN-MATH", f"{said}; {best.form} is no faster in this run")
    value = f"{said} runs and stores all scores; {best.form}, which stores none, computes correctly here"
    value += "" if slower else " and faster"
    return caution("ATTN-MATH", value, "set attention: auto", gain=gain)


def _best_fused(measured: Measurements) -> AttentionTrial | None:
    fused = [trial for trial in measured.attention if trial.passed and trial.form in _FUSED]
    return min(fused, key=lambda trial: trial.seconds, default=None)


def backward_line(one: Ready, taken: Taken, measured: Measurements) -> Finding:
    """If the backward pass is slow, try the known remedies and suggest the best."""
    watched = [report.profile for report in taken.reports[1:] if report.profile]
    forward = statistics.median(profile.forward_ms for profile in watched)
    backward = statistics.median(profile.backward_ms for profile in watched)
    ratio = backward / forward
    said = f"{ratio:.2f} ({forward:,.1f} ms forward, {backward:,.1f} ms backward for a micro-batch)"
    if ratio <= BACKWARD:
        return ok("BWD-RATIO", said)
    tried = _remedies(one, measured)
    best = max(tried, key=lambda fix: tried[fix], default=None)
    if best is None or tried[best] < NEAR:
        names = f" (tried: {', '.join(tried)})" if tried else ""
        return caution("BWD-RATIO", said, f"`surefoot train --profile 5` names the operators{names}")
    return caution("BWD-RATIO", said, f"set {best}", gain=tried[best])


def _remedies(one: Ready, measured: Measurements) -> dict[str, float]:
    """Setting -> measured time without it divided by time with it."""
    plan, best = one.plan, _best_fused(measured)
    tried: dict[str, float] = {}
    micro = plan.batch.micro.value
    while micro > 1:  # halve while it helps: swapping memory may need more than one halving
        micro //= 2
        gain = gain_of_micro(one, micro)
        if tried and gain < NEAR * max(tried.values()):
            break
        tried[f"batch.micro: {micro}"] = gain
    if best is not None and plan.attention.implementation.value == "sdpa":
        tried["attention: auto"] = gain_of_kernel(one, best.form)  # type: ignore[arg-type]
    if plan.compile.value != "off":
        tried["compile: off"] = gain_of_eager(one)
    return tried


def waiting_line(taken: Taken, workers: int) -> Finding:
    """workers: number of data workers."""
    said = f"{taken.waiting / (taken.waiting + taken.whole):.1%} of a step"
    if taken.waiting <= WAIT * (taken.waiting + taken.whole):
        return ok("DATA-WAIT", said)
    gain = (taken.waiting + taken.whole) / taken.whole
    fix = (
        "set data.workers: 1 to prepare the next steps in the background"
        if not workers
        else "put the cache on a faster disk"
    )
    return caution("DATA-WAIT", said, fix, gain=gain)


def workers_line(one: Ready, taken: Taken, workers: int) -> Finding:
    """workers: number of data workers."""
    own = taken.preparing / (taken.preparing + taken.whole)
    if not workers or own > WAIT:
        return ok("WORKERS-USELESS", f"{workers}")
    said = f"{workers}, for batches that take {own:.1%} of a step to prepare"
    return caution("WORKERS-USELESS", said, "set data.workers: 0", gain=gain_without_workers(one, workers))


def compile_line(taken: Taken, plan: RunPlan, one: Ready) -> Finding:
    late = taken.compiled[-1] - taken.compiled[_WARM_UP - 1]
    if plan.compile.value == "off" and not late:
        return ok("COMPILE-RECOMPILES", "compile is off")
    said = f"{late} in steps {_WARM_UP + 1} to {len(taken.compiled)}"
    if not late:
        return ok("COMPILE-RECOMPILES", said)
    fix = "set compile: off: lengths differ from step to step"
    return caution("COMPILE-RECOMPILES", said, fix, gain=gain_of_eager(one))


def check_steps(config: RunConfig, steps: int, say: Callable[[str], None]) -> tuple[Finding, ...]:
    """Take some steps in this process, discard the weights, and report losses, gradients and whether the loss falls.
    say: called with one line per step. Raises SurefootError like the run."""
    alone = config.model_copy(update={"parallel": ParallelConfig()})
    with silent_console() as silence, captured_libraries(silence), ready(alone, steps) as one:
        taken = take(one, steps, lambda report: say(" · ".join(_words(report, steps))))
        return tuple(number_lines(taken, one.plan.precision.compute.value, falls=not config.method.rollouts))


def _words(report: StepReport, steps: int) -> Iterator[str]:
    yield f"step {report.step}/{steps}"
    yield f"loss {number(report.loss)}"
    yield f"grad {number(report.grad_norm, 3)}"
    yield f"lr {report.lr:.3g}"
    yield f"{report.seconds:.2f} s"
    if report.decision != "stepped":
        yield report.decision.replace("_", " ")
