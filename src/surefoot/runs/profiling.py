"""Profile a run: the phases before step 1, and the steps that `--profile N` times and traces.

phases = Phases(imports=hardware.process_seconds(), tell=console.say)
phases.end("data")          # time since the last call
with phases.during("weights", "loading the weights"):   # says so if it takes long
    ...
console.say(phases.sentence())

with profiled(job, options, arithmetic, run_folder, done, observer) as job:
    run_loop(job, ...)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from surefoot.data.batching.batch import IGNORE, Weighted
from surefoot.families.model_facts import ModelFacts
from surefoot.method_facts.methods import METHODS
from surefoot.models.facts import facts_of
from surefoot.planning.limits import (
    NO_WORK,
    StepFlops,
    Work,
    attention_flops,
    layer_flops,
    step_flops,
    work_of,
)
from surefoot.planning.plan import RunPlan
from surefoot.planning.probes.matmul import product_rates
from surefoot.report.console import as_plain_text
from surefoot.report.observer import RunObserver, SilentObserver
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
    draw_profile,
    profile_table,
)
from surefoot.runs.measured import linear_shapes
from surefoot.system import durable
from surefoot.system.errors import SurefootError
from surefoot.training.loop import Job
from surefoot.training.profile import Recorded, Stopwatch, Window

_KEPT = 100  # operators in profile.json


@dataclass(frozen=True)
class ProfileOptions:
    """Which steps are timed.

    every: print forward and backward times of every N-th step.
    steps: profile this many steps after a warm-up.
    """

    every: int | None = None
    steps: int | None = None


NO_PROFILE = ProfileOptions()


@contextmanager
def profiled(
    job: Job,
    options: ProfileOptions,
    arithmetic: Arithmetic,
    run: Path,
    start: int,
    observer: RunObserver | SilentObserver,
) -> Iterator[Job]:
    """Yield the job with profiling. start: steps done before. Only the first rank is profiled."""
    device = job.engine.device
    if options.steps is None or job.engine.rank:
        every = options.every
        if every is not None:
            plain = job.watch
            job = replace(job, watch=lambda step: plain(step) if step % every else Stopwatch(device))
        yield job
        return
    works: dict[int, Work] = {}

    def finished(recorded: Recorded) -> None:
        clocked = sum((works.get(step, NO_WORK) for step in range(recorded.first, recorded.last + 1)), start=NO_WORK)
        with observer.during("writing the profile"):
            _write_profile(profile_report(recorded, clocked, arithmetic, job.engine.world), recorded, run, observer)

    window = Window(start + 1, job.total_steps, options.steps, device, finished)

    def batches(step: int) -> Sequence[Weighted]:
        found = job.batches(step)
        if step in window.clocked:
            works[step] = step_work(found)
        return found

    try:
        yield replace(
            job,
            watch=window.watch,
            batches=batches,
            save=_clocked(window, "checkpoint", job.save),
            evaluate=None if job.evaluate is None else _clocked(window, "evaluation", job.evaluate),
        )
    except BaseException:
        window.abandon()
        raise
    window.close()


def profile_report(recorded: Recorded, work: Work, arithmetic: Arithmetic, world: int = 1) -> ProfileReport:
    """work: work of the timed steps on this rank. world: number of ranks."""
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
    """Matmul rate of this machine in FLOP/s at the model's shapes and dtype, on all its threads; None if the device
    does not support the dtype."""
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
        return None, f"no arithmetic limit is given for stage {arithmetic.stage}: its steps include other passes"
    rate = product_rate(arithmetic)
    if rate is None or not work.tokens:
        return None, "no arithmetic limit is given: products of this dtype could not be timed"
    flops = arithmetic.flops(work)

    def of_limit(needed: float, seconds: float) -> float:
        return needed / rate / seconds if seconds else 0.0

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


def _write_profile(
    report: ProfileReport, recorded: Recorded, run: Path, observer: RunObserver | SilentObserver
) -> None:
    """Print and write the profile. A failure to write it is only a warning."""
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


def _clocked(window: Window, part: Literal["checkpoint", "evaluation"], function: Callable) -> Callable:
    """Count the function's time as this part, between steps."""

    def clocked(argument):
        with window.between(part):
            return function(argument)

    return clocked


COMPILE = "compile"
START = "start_seconds"  # key in environment.json, per rank
_SHOWN = 0.05  # seconds; shorter phases are not shown
_LONG = 5.0  # seconds without a line, after which a user may think that the run hangs


class Phases:
    """Wall-clock seconds by phase, in order.

    imports: seconds since the process started; 0 if it was not started for this run.
    tell: called from another thread with a line about a phase that takes long.
    """

    def __init__(self, imports: float = 0.0, tell: Callable[[str], object] = lambda line: None) -> None:
        self.seconds: dict[str, float] = {"imports": imports} if imports else {}
        self._tell = tell
        self._since = time.perf_counter()

    @contextmanager
    def during(self, phase: str, doing: str) -> Iterator[None]:
        """Count the block's time as this phase. doing: what it does, told if it takes long."""
        timer = threading.Timer(_LONG, lambda: self._tell(f"after {self._now:.0f} s: {doing} ..."))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
        self.end(phase)

    def end(self, phase: str) -> None:
        """Add the time since the last call (or the beginning) to this phase; a phase may have several parts."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now

    @property
    def _now(self) -> float:
        return self.whole + time.perf_counter() - self._since

    @property
    def whole(self) -> float:
        return sum(self.seconds.values())

    @property
    def compiling(self) -> float:
        return self.seconds.get(COMPILE, 0.0)

    def sentence(self) -> str:
        """ready in 9.1 s: imports 5.2, data 0.3, model 0.6, comparison 2.9"""
        shown = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in self.seconds.items() if seconds >= _SHOWN)
        return f"ready in {self.whole:.1f} s{': ' if shown else ''}{shown}"

    def to_json(self) -> dict[str, float]:
        """Rounded to milliseconds."""
        return {phase: round(seconds, 3) for phase, seconds in self.seconds.items()}


def step_work(micro_batches: Sequence[Weighted]) -> Work:
    """Work of this rank's micro-batches; labels are those of the rows, whatever the weight of the batch."""
    return sum(
        (work_of(batch.rows.lengths, int((batch.rows.targets != IGNORE).sum())) for batch in micro_batches),
        start=NO_WORK,
    )


@dataclass(frozen=True)
class Arithmetic:
    """Computes the FLOPs of a run's models. stage: the config's stage."""

    model: ModelFacts
    plan: RunPlan
    stage: str

    @property
    def is_whole(self) -> bool:
        """Whether `flops` covers all of a step: not where other models run too, or answers are generated."""
        return METHODS[self.stage].one_pass and self.plan.reference is None

    def effort(self, micro_batches: Sequence[Weighted]) -> float:
        """Time cost of a forward pass of these batches, in FLOPs of large matmuls: padding is computed too, and the
        small matmuls of attention run at about a third of the rate."""
        computed = sum(batch.rows.input_ids.numel() for batch in micro_batches)
        squares = sum(length * length for batch in micro_batches for length in batch.rows.lengths)
        return layer_flops(self.model, computed) + 3.0 * attention_flops(self.model, squares, computed)

    def flops(self, work: Work) -> StepFlops:
        return step_flops(
            self.model,
            work,
            self.plan.adapter,
            head=not METHODS[self.stage].scores,
            checkpointed=float(self.plan.memory.gradient_checkpointing.value),
        )
