"""Ten real steps of the run, on its own data and weights, with everything that can go wrong in them looked at.

They are taken at the peak of the learning rate from the first step on, because a warm-up would hide what the run meets
later, and over a few micro-batches of each step, because ten whole ones may take an hour.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from surefoot.commands.doctor.codes import FP32
from surefoot.commands.doctor.findings import Finding, caution, fault, ok
from surefoot.commands.doctor.passes import Observed
from surefoot.data.batching.batch import Weighted
from surefoot.planning.measurements import Measurements
from surefoot.planning.plan import DType
from surefoot.runs.trial import Ready
from surefoot.training.profile import Stopwatch
from surefoot.training.report import StepReport
from surefoot.training.state import LossScale

STEPS = 10
MICRO_BATCHES = 2  # of a step
_ENOUGH, _PATIENCE = 4, 240.0  # steps that are always taken, and seconds after which no more are
_NORMS = (1e-6, 1e4)
_SHOWN = 3  # modules


@dataclass(frozen=True)
class Taken:
    """What ten steps showed, or fewer where they are very slow. reports: with a profile each. again: the first step's
    loss after all of them. waiting: seconds until a step's batches were there, from the second step on. compiled:
    graphs that torch compiled up to each step. preparing: seconds in which one thread prepares a step's batches. whole:
    seconds that a whole step would take, of which only some micro-batches were computed."""

    reports: Sequence[StepReport]
    again: float | None
    waiting: float
    preparing: float
    whole: float
    compiled: Sequence[int]


def take(one: Ready, steps: int = STEPS, tell: Callable[[StepReport], None] = lambda report: None) -> Taken:
    """The weights move, and nobody keeps them. tell: hears of each step."""
    stage, state = one.run.stage, one.setup.state
    reports, waits, parts, compiled = [], [], [], []
    began = time.perf_counter()
    for number in range(1, steps + 1):
        if number > _ENOUGH and time.perf_counter() - began > _PATIENCE:
            break
        started = time.perf_counter()
        found = one.batches(number)
        waits.append(time.perf_counter() - started)
        found = found if stage.ready is None else stage.ready(number, found)
        some = few(found)
        parts.append(len(some) / len(found))
        report = _step(one, number, some, state.scale, moving=True)
        state = state.after_step(report)
        reports.append(report)
        tell(report)
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
    watch = Stopwatch(one.setup.engine.device)
    return one.step_at(number, batches, lambda schedule: schedule.peak if moving else 0.0, scale, watch)


def _graphs() -> int:
    """That torch has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def number_lines(taken: Taken, compute: DType, *, falls: bool) -> list[Finding]:
    """Loss and gradients.

    compute: the type of products.
    falls: whether the loss of the first step's examples is one that learning lowers.
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
        fix = "look at the examples of the largest loss, at optim.lr and at the base's weights"
        lines.append(caution("GRAD-NORM", said, fix) if outside else ok("GRAD-NORM", said))
    if falls and losses and taken.again is not None:
        said = f"{losses[0]:.4g} → {taken.again:.4g}"
        if taken.again < losses[0]:
            lines.append(ok("LOSS-FALLING", said))
        else:
            lines.append(caution("LOSS-FALLING", said, "lower optim.lr, or look at the labels with `surefoot data`"))
    return lines


def product_line(one: Ready, seen: Observed, compute: str, measured: Measurements) -> Finding:
    """What torch's math kernel of attention multiplies in fp32 is `ATTN-MATH`'s: nothing in the module can be
    changed."""
    its_own = _attention_names(one) if "math" in seen.kernels else set()
    modules = [(name, part) for name, part in seen.products.modules("fp32") if name.rpartition(".")[2] not in its_own]
    share = sum(part for _, part in modules)
    if compute == "fp32" or share <= FP32:
        said = "an fp32 run" if compute == "fp32" else f"{share:.1%}"
        return ok("GEMM-FP32-SHARE", said)
    where = ", ".join(f"{name} {part:.0%}" for name, part in modules[:_SHOWN])
    rates = measured.products
    gain = None
    if compute in rates and "fp32" in rates:  # Amdahl's law over the products alone
        faster = rates[compute] / rates["fp32"]  # type: ignore[index]
        gain = (share * faster + 1 - share) if faster > 1 else None
    fix = "let these modules run under autocast: no .float() and no autocast(enabled=False) around their products"
    return caution("GEMM-FP32-SHARE", f"{share:.0%}, in {where}", fix, gain=gain)


def _attention_names(one: Ready) -> set[str]:
    """What the layers call their attention."""
    named = one.setup.policy.named_modules()
    return {name.rpartition(".")[2] for name, module in named if type(module).__name__.endswith("Attention")}
