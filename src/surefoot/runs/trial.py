"""Time a few real steps of a run, with its model, data and plan, and leave nothing behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import Weighted
from surefoot.data.batching.loader import own_batches
from surefoot.data.batching.prefetch import prefetched
from surefoot.methods.method import LoadedModels, ignore
from surefoot.models.modes import without_randomness
from surefoot.planning.plan import RunPlan
from surefoot.report.observer import silent_console
from surefoot.runs.custom import with_named
from surefoot.runs.faults import memory_faults
from surefoot.runs.prepare import prepare
from surefoot.runs.prepared import PreparedRun, make_schedules, with_models
from surefoot.runs.profiling import Phases
from surefoot.runs.run_folder import FolderState
from surefoot.runs.steps import load_and_check
from surefoot.system import hardware
from surefoot.system.allocator import resident_bytes
from surefoot.training.optimizer import Schedule
from surefoot.training.profile import Watch, unwatched
from surefoot.training.ranks import ALONE
from surefoot.training.report import StepReport
from surefoot.training.session import open_session
from surefoot.training.state import LossScale
from surefoot.training.step import train_step

Clock = Literal["wall", "cpu"]
_CLOCKS: Mapping[Clock, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Rival:
    """What a trial must keep up with.

    seconds: durations of the same steps, beginning with the last untimed one.
    margin: the trial is stopped once its total exceeds the rival's by this factor.
    """

    seconds: tuple[float, ...]
    margin: float

    def beats(self, seconds: Sequence[float]) -> bool:
        """Whether the trial is too slow. seconds: durations of its steps so far."""
        return sum(seconds) > self.margin * sum(self.seconds[: len(seconds)])


@dataclass(frozen=True)
class Trial:
    """Result of a few timed steps.

    losses, grad_norms: of the steps before the timed ones, in order; None if not finite.
    last: seconds of the last of these.
    seconds: seconds of each timed step, in its best round.
    waiting: seconds of that round until the step's batches were ready.
    tokens: real input tokens of each timed step.
    memory: peak bytes above what the process used before.
    forecast: the plan's memory in bytes.
    spread: duration of the slowest round relative to the fastest.
    held_up: fraction of the wall time in which this process did not run, because of other programs; 0 with several
        threads, for which processor time does not show it.
    beside: None if all steps were taken; else the speed relative to the rival when the trial was stopped.
    """

    losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...]
    last: float
    seconds: tuple[float, ...]
    waiting: tuple[float, ...]
    tokens: tuple[int, ...]
    memory: int
    forecast: int
    spread: float
    held_up: float
    beside: float | None = None

    @property
    def rate(self) -> float:
        """Real input tokens per second, if all steps were taken."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def paced(self) -> tuple[float, ...]:
        """Seconds beginning with the last untimed step: the `seconds` of a rival."""
        return (self.last, *self.seconds)


@dataclass(frozen=True)
class Ready:
    """A run before its first step. batches: step -> micro-batches."""

    run: PreparedRun
    loaded: LoadedModels
    batches: Callable[[int], Sequence[Weighted]]

    @property
    def plan(self) -> RunPlan:
        return self.run.plan

    def step(self, number: int, batches: Sequence[Weighted]) -> StepReport:
        """Take optimizer step `number` (from 1) with the run's learning rate and loss scale."""
        at = min(number, self.run.timetable.total_steps) - 1
        return self.step_at(number, batches, lambda schedule: schedule.rate(at), self.loaded.state.scale)

    def step_at(
        self,
        number: int,
        batches: Sequence[Weighted],
        rate: Callable[[Schedule], float],
        scale: LossScale | None,
        watch: Watch = unwatched,
    ) -> StepReport:
        """Take optimizer step `number` (from 1). rate: learning rate from a group's schedule. scale: loss scale of
        fp16."""
        task, loaded = self.run.task, self.loaded
        schedules = make_schedules(self.run, loaded.engine.groups)
        return train_step(
            loaded.engine,
            task.objective,
            batches,
            step=number,
            lr={name: rate(schedule) for name, schedule in schedules.items()},
            scale=scale,
            settings=replace(loaded.settings, bounds=task.bounds),
            watch=watch,
        )


@contextmanager
def ready(config: RunConfig, last: int, phases: Phases | None = None) -> Iterator[Ready]:
    """Plan, load and verify `config` in this process without touching its run folder. Raises SurefootError like the
    run.

    last: the last step that will be taken.
    phases: records how long each part took.
    """
    with tempfile.TemporaryDirectory(prefix="surefoot-") as temporary, silent_console() as console:
        folder = Path(temporary) / "run"
        config = config.model_copy(update={"output": str(folder)})
        with open_session(ALONE, config.parallel.timeout) as session:
            own = with_named(config)
            run = prepare(config, FolderState(folder, "new"), console, own, phases=phases)
            run, loaded, _ = load_and_check(run, session, own, console, phases)
            run = with_models(run, loaded, ignore)
            try:
                own = own_batches(run.task.step_batches)
                with closing(run.task), prefetched(own, config.data.workers, last=last) as batches:
                    yield Ready(run, loaded, batches)
            finally:
                loaded.engine.release()


def run_trial(
    config: RunConfig,
    *,
    steps: int,
    warm_up: int = 2,
    rounds: int = 2,
    rival: Rival | None = None,
    clock: Clock = "wall",
) -> Trial:
    """Take `warm_up` steps of the run, then time `steps` more, `rounds` times, each round continuing with the weights
    of the last. The best round of each step counts. Dropout and noise are off, because their draws depend on how a step
    is split. The trial stops in its first round if the rival beats it. Memory is only meaningful in a separate process.
    With `steps=0` only the first losses and gradient norms are returned.

    clock: "cpu" counts this process's processor time, which for one thread is nearly the wall time on an idle machine.
    """
    before = resident_bytes()
    last = warm_up + steps
    with ready(config, last) as one, memory_faults("trial", one.run.config, one.plan):
        started = _CLOCKS["wall"](), _CLOCKS["cpu"]()
        with without_randomness(one.loaded.engine.model):
            first = [_timed(one, number, clock) for number in range(1, warm_up + 1)]
        taken, beaten = [first[-1]], False
        for number in range(warm_up + 1, last + 1):
            if beaten := rival is not None and rival.beats([step.seconds for step in taken]):
                break
            taken.append(_timed(one, number, clock))
        repeats = 0 if beaten else rounds - 1
        others = [[_timed(one, number, clock) for number in range(warm_up + 1, last + 1)] for _ in range(repeats)]
        wall, cpu = _CLOCKS["wall"]() - started[0], _CLOCKS["cpu"]() - started[1]
        device = one.plan.device.value
        peak = hardware.peak_memory(device)
        forecast = one.plan.memory.total
    timed = [taken[1:], *others]
    best = [min(step, key=lambda one: one.seconds) for step in zip(*timed, strict=True)]
    whole = [sum(step.seconds for step in steps) for steps in timed]
    pace = [step.seconds for step in taken]
    return Trial(
        losses=tuple(step.report.loss for step in first),
        grad_norms=tuple(step.report.grad_norm for step in first),
        last=first[-1].seconds,
        seconds=tuple(step.seconds for step in best),
        waiting=tuple(step.waiting for step in best),
        tokens=tuple(step.report.tokens for step in best),
        memory=peak if device == "cuda" else peak - before,
        forecast=forecast,
        spread=max(whole) / min(whole) if others else 1.0,
        held_up=held_up(wall, cpu, device, one.plan.threads.value),
        beside=sum(rival.seconds[: len(pace)]) / sum(pace) if rival is not None and beaten else None,
    )


def held_up(wall: float, cpu: float, device: str, threads: int) -> float:
    """Fraction of the wall time in which other programs had the processor.

    wall, cpu: seconds.

    A single thread otherwise runs all the time. With several threads or a GPU, waiting is part of the work: returns 0.
    """
    return max(0.0, 1 - cpu / wall) if device == "cpu" and threads == 1 else 0.0


@dataclass(frozen=True)
class _Step:
    report: StepReport
    seconds: float
    waiting: float


def _timed(one: Ready, number: int, clock: Clock) -> _Step:
    """Take a step with the run's learning rate. `train_step` synchronizes with the device before it reports."""
    now = _CLOCKS[clock]
    started = now()
    batches = one.batches(number)
    waiting = now() - started
    report = one.step(number, batches)
    return _Step(report, now() - started, waiting)
