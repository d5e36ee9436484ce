"""`surefoot train --profile N`: the wish, and the loop's job with a window around some of its steps.

The folder `profile` of the run gets profile.json, a trace for Perfetto and a picture; the terminal gets a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.data.batch import Weighted
from surefoot.models.facts import facts_of
from surefoot.planning.limits import NO_WORK, Work, fraction_of_limit
from surefoot.planning.plan import RunPlan
from surefoot.planning.probes.matmul import product_rates
from surefoot.report.console import as_plain_text
from surefoot.report.observer import RunObserver
from surefoot.report.pictures.profile import draw_profile
from surefoot.report.profile import (
    BETWEEN,
    FOLDER,
    IN_STEP,
    OTHER,
    PICTURE,
    RECORD,
    TRACE,
    LimitFacts,
    OperatorTime,
    ProfileReport,
    profile_table,
)
from surefoot.report.silent import SilentObserver
from surefoot.runs.arithmetic import Arithmetic, step_work
from surefoot.runs.planned import linear_shapes
from surefoot.system import durable
from surefoot.system.errors import SurefootError
from surefoot.training.loop import Job
from surefoot.training.profile import Stopwatch
from surefoot.training.window import Recorded, Window

_KEPT = 100  # operators in profile.json


@dataclass(frozen=True)
class ProfileWish:
    """every: print forward and backward times of every N-th step. steps: profile so many steps after some warm-up."""

    every: int | None = None
    steps: int | None = None


NO_PROFILE = ProfileWish()


@contextmanager
def profiled(
    job: Job, wish: ProfileWish, arithmetic: Arithmetic, run: Path, start: int, observer: RunObserver | SilentObserver
) -> Iterator[Job]:
    """The job as wished, while the block runs. start: steps done before it. Ranks but the first are not profiled."""
    device = job.engine.device
    if wish.steps is None or job.engine.rank:
        every = wish.every
        if every is not None:
            plain = job.watch
            job = replace(job, watch=lambda step: plain(step) if step % every else Stopwatch(device))
        yield job
        return
    works: dict[int, Work] = {}

    def finished(recorded: Recorded) -> None:
        clocked = sum((works.get(step, NO_WORK) for step in range(recorded.first, recorded.last + 1)), start=NO_WORK)
        with observer.during("writing the profile"):
            _tell(profile_report(recorded, clocked, arithmetic, job.engine.world), recorded, run, observer)

    window = Window(start + 1, job.total_steps, wish.steps, device, finished)

    def batches(step: int) -> Sequence[Weighted]:
        found = job.batches(step)
        if step in window.phases.clocked:
            works[step] = step_work(found)
        return found

    try:
        yield replace(
            job,
            watch=window.watch,
            batches=batches,
            save=_between(window, job.save),
            evaluate=None if job.evaluate is None else _evaluating(window, job.evaluate),
        )
    except BaseException:
        window.abandon()
        raise
    window.close()


def profile_report(recorded: Recorded, work: Work, arithmetic: Arithmetic, world: int = 1) -> ProfileReport:
    """work: of the clocked steps, on this rank. world: ranks."""
    steps = recorded.steps
    inside = {part: recorded.parts[part] for part in IN_STEP if part != OTHER}
    inside[OTHER] = max(0.0, recorded.step_seconds - sum(inside.values()))
    limit, why = _limit(recorded, work, arithmetic)
    return ProfileReport(
        first=recorded.first,
        last=recorded.last,
        tokens_per_second=world * work.tokens / recorded.step_seconds,
        parts={part: seconds / steps for part, seconds in inside.items()},
        between={part: recorded.parts[part] for part in BETWEEN},
        traced=recorded.traced,
        operators=tuple(
            OperatorTime(one.name, one.seconds / recorded.traced, one.calls / recorded.traced)
            for one in recorded.operators[:_KEPT]
        ),
        limit=limit,
        no_limit=why,
        clocked=recorded.counted.seconds,
        processor=recorded.counted.own,
        waited=recorded.counted.waited + recorded.counted.throttled,
    )


def product_rate(arithmetic: Arithmetic) -> float | None:
    """FLOP/s of this machine's matrix products at the model's shapes, as the run computes them, on all of its threads;
    None where the device refuses the type."""
    import torch

    plan = arithmetic.plan
    dtype, device = plan.precision.compute.value, torch.device(plan.device.value)
    rate = product_rates(linear_shapes(arithmetic.model), device, dtypes=(dtype,)).get(dtype)
    return rate if rate is None or device.type != "cpu" else rate * plan.threads.value


def arithmetic_of(plan: RunPlan, stage: str, base: Path) -> Arithmetic:
    """base: folder of the model."""
    return Arithmetic(facts_of(base), plan, stage)


def _limit(recorded: Recorded, work: Work, arithmetic: Arithmetic) -> tuple[LimitFacts | None, str]:
    if not arithmetic.is_whole:
        return None, f"the arithmetic limit of stage {arithmetic.stage} is not told: other passes belong to its steps"
    rate = product_rate(arithmetic)
    if rate is None or not work.tokens:
        return None, "the arithmetic limit is not told: products of this type could not be timed"
    flops = arithmetic.flops(work)

    def of_limit(needed: float, seconds: float) -> float:
        return fraction_of_limit(needed, rate, seconds) if seconds else 0.0

    found = LimitFacts(
        flops_per_token=flops.needed / work.tokens,
        recomputed_per_token=flops.recomputed / work.tokens,
        rate=rate,
        dtype=arithmetic.plan.precision.compute.value,
        of_step=of_limit(flops.needed, recorded.step_seconds),
        of_forward=of_limit(flops.forward, recorded.parts["forward"]),
        of_backward=of_limit(flops.backward, recorded.parts["backward"]),
    )
    return found, ""


def _tell(report: ProfileReport, recorded: Recorded, run: Path, observer: RunObserver | SilentObserver) -> None:
    """A profile that cannot be written is a caution, never the end of the run."""
    observer.tell(as_plain_text(profile_table(report)), caution=False)
    try:
        with durable.staged_folder(run / FOLDER, replace=True) as folder:
            durable.write_json(folder / RECORD, report.to_json())
            recorded.write_trace(folder / TRACE)
            durable.write_bytes(folder / PICTURE, draw_profile(report))
    except (SurefootError, OSError, RuntimeError, ValueError) as error:
        observer.caution(f"the profile was not written: {error}")
        return
    trace = f"; open {run / FOLDER / TRACE} at https://ui.perfetto.dev" if recorded.traced else ""
    observer.tell(f"profile written: {run / FOLDER}{trace}", caution=False)


def _between(window: Window, save: Callable) -> Callable:
    def saving(state):
        with window.between("checkpoint"):
            return save(state)

    return saving


def _evaluating(window: Window, evaluate: Callable) -> Callable:
    def evaluating(step: int):
        with window.between("evaluation"):
            return evaluate(step)

    return evaluating
