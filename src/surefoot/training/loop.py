"""The training loop: step, evaluate, save, stop, in this order, for every stage.

It knows no stage, no family and no YAML: it gets functions, and calls an observer after each event.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from surefoot.data.batching.batch import Weighted
from surefoot.system.errors import Diverged, Fault, SurefootError
from surefoot.system.messages import counted
from surefoot.training.engine import Engine
from surefoot.training.failure import Attempt, Recorder, look_into
from surefoot.training.guard import RECENT, StepsLost, spike_ceiling
from surefoot.training.interrupt import StopRequest
from surefoot.training.objective import Objective
from surefoot.training.optimizer import Schedule
from surefoot.training.profile import Watch, unwatched
from surefoot.training.report import EvalReport, StepReport, example_list
from surefoot.training.state import Goal, RunState
from surefoot.training.step import StepSettings, train_step


class Observer(Protocol):
    """Called after each event, in order. It may write logs; it changes nothing."""

    def step(self, report: StepReport, state: RunState) -> None: ...
    def evaluation(self, report: EvalReport, state: RunState, improved: bool) -> None: ...
    def saved(self, folder: Path, state: RunState) -> None: ...


class Memory(Protocol):
    """What a stage carries from step to step besides weights, moments and `RunState`; it goes into every checkpoint."""

    def to_json(self) -> Mapping[str, Any]:
        """Plain values, for state.json."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """By name, for a file of their own; empty where nothing of that kind is carried."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Numbers on the step whose batches were made last, for its report."""
        ...

    def learned(self, report: StepReport) -> None:
        """Called after each step. Raises Diverged where the stage cannot go on."""
        ...


@dataclass(frozen=True)
class Job:
    """What to run. Steps count from 1; a step is due for evaluation or saving when it is in the set.

    batches: step -> its micro-batches; may run the model.
    schedules: of the learning rate, by group of parameters.
    evaluate: step -> report, or None where it gave up because the run is to stop.
    save: writes a checkpoint of engine and state; None where it is still being written.
    keep_best: whether an evaluation that is the best so far is followed by a checkpoint.
    goal: which evaluation result is watched.
    max_consecutive, max_recent: non-finite steps in a row, and among the last `guard.RECENT`, that are allowed.
    clip_spikes: whether a gradient norm that is an outlier is scaled down to what the steps before had.
    patience: evaluations without improvement before the run ends; None trains to the end.
    min_delta: what counts as an improvement, in units of the goal.
    watch: step -> what times its parts.
    memory: of a stage that has one.
    check_every: steps between two comparisons of ranks that should hold the same weights; None where there are none.
    recorder: of all ranks or of none.
    saved: checkpoints that were finished since the last call, each with its state; called with True, it waits for one
        that is being written. Raises what stopped one.
    """

    engine: Engine
    objective: Objective
    batches: Callable[[int], Sequence[Weighted]]
    schedules: Mapping[str, Schedule]
    settings: StepSettings
    total_steps: int
    evaluate: Callable[[int], EvalReport | None] | None
    eval_steps: frozenset[int]
    save: Callable[[RunState], Path | None]
    save_steps: frozenset[int]
    keep_best: bool
    goal: Goal
    max_consecutive: int
    max_recent: int
    clip_spikes: bool
    patience: int | None
    min_delta: float
    watch: Callable[[int], Watch] = lambda step: unwatched
    memory: Memory | None = None
    check_every: int | None = None
    recorder: Recorder | None = None
    saved: Callable[[bool], Sequence[tuple[RunState, Path]]] = lambda wait: ()


@dataclass(frozen=True)
class Outcome:
    state: RunState
    reason: Literal["finished", "early_stopped", "interrupted"]


def run_loop(job: Job, state: RunState, observer: Observer, stop: StopRequest) -> Outcome:
    """Run from `state` to the end, or until evaluation stops improving, or until a signal asks to stop; then the last
    checkpoint is whole.

    Raises StepsLost after `max_consecutive` non-finite steps in a row or more than `max_recent` within a short time,
    Diverged for a moment of the optimizer that is not finite; the last checkpoint stays as it is.
    """
    clock = _Clock()
    outcome = _step_until_over(job, state, observer, stop, clock)
    _notify_saved(job, observer, wait=True)
    return replace(outcome, state=outcome.state.spent("saving", clock.lap()))


class _Clock:
    """Every moment of the loop is counted once: the time since the last lap goes to whatever took it."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last one."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def _step_until_over(job: Job, state: RunState, observer: Observer, stop: StopRequest, clock: _Clock) -> Outcome:
    state = _with_memory(job, state)  # a checkpoint may come before the first step
    if _evaluation_due(job, state):  # an earlier session was stopped between the step and its evaluation
        state, saved = _evaluate_and_save(job, state, observer, clock)
        if not saved and stop.requested:
            return Outcome(state, "interrupted")
    while not is_over(job, state):
        step = state.step + 1
        watch = job.watch(step)
        with _recorded(job, Attempt(step, phase="batches")), watch("data"):
            micro_batches = job.batches(step)
        state = state.spent("batches", clock.lap())
        lr = {name: schedule.rate(step - 1) for name, schedule in job.schedules.items()}
        attempt = Attempt(step, micro_batches, lr, state.scale)
        report = _recorded_step(job, attempt, spike_ceiling(state.norms) if job.clip_spikes else None, watch)
        brake: Diverged | None = None
        if job.memory is not None:
            brake = _brake(job, job.memory, attempt, report)
            report = replace(report, metrics={**job.memory.metrics(), **report.metrics})
        state = _with_memory(job, state.after_step(report))
        observer.step(report, state)  # before the brake, so that the log ends with the step that ended the run
        if brake is not None:
            raise brake
        over = _is_lost(job, state, report)
        if over or (job.recorder is not None and report.decision == "non_finite" and state.guard.consecutive == 1):
            # Of bad steps in a row the first is recorded too: the weights are still those that it began with.
            words = look_into(job.engine, job.objective, job.settings, attempt, report, job.recorder)
            if over:
                raise _diverged(report, state, words, job.max_consecutive)
        if job.check_every and step % job.check_every == 0:
            job.engine.check_replicas()
        _notify_saved(job, observer)
        stop.agree()  # once a step and at the same place on all ranks, else one would save while another steps on
        state = state.spent("other", clock.lap() - report.seconds)
        saved = False
        if not stop.requested:
            wishes = stop.take_wishes()
            if "evaluate" in wishes and not _evaluation_due(job, state):
                # It is only shown: as a candidate for the best it would make this run another than one without signal.
                if (reading := _evaluated(job, state.step)) is not None:
                    observer.evaluation(reading, state, improved=False)
                state = state.spent("evaluation", clock.lap())
            state, saved = _evaluate_and_save(job, state, observer, clock)
            if "save" in wishes and not saved:
                state, saved = _save(job, state, observer, clock), True
        if stop.requested and not (saved and is_over(job, state)):
            if not saved:
                state = _save(job, state, observer, clock)
            return Outcome(state, "interrupted")
    return Outcome(state, "finished" if state.step >= job.total_steps else "early_stopped")


def _is_lost(job: Job, state: RunState, report: StepReport) -> bool:
    guard = state.guard
    lasting = report.non_finite == "moment"  # no other data would mend it
    return report.decision == "non_finite" and (
        lasting or guard.consecutive >= job.max_consecutive or len(guard.recent) > job.max_recent
    )


@contextmanager
def _recorded(job: Job, attempt: Attempt) -> Iterator[None]:
    """What crashes inside is kept for a replay. A SurefootError is a refusal, in words of its own, and no crash."""
    try:
        yield
    except Exception as error:
        if job.recorder is not None and not isinstance(error, SurefootError):
            job.recorder.crashed(attempt, error)
        raise


def _recorded_step(job: Job, attempt: Attempt, ceiling: float | None, watch: Watch) -> StepReport:
    with _recorded(job, attempt):
        return train_step(
            job.engine,
            job.objective,
            attempt.micro_batches,
            step=attempt.step,
            lr=attempt.lr,
            scale=attempt.scale,
            settings=job.settings,
            ceiling=ceiling,
            watch=watch,
        )


def _brake(job: Job, memory: Memory, attempt: Attempt, report: StepReport) -> Diverged | None:
    """Why the stage cannot go on from this step, which is logged first; None where it can."""
    try:
        with _recorded(job, replace(attempt, phase="memory")):
            memory.learned(report)
    except Diverged as error:
        return error
    return None


def _evaluated(job: Job, step: int) -> EvalReport | None:
    if job.evaluate is None:
        return None
    with _recorded(job, Attempt(step, phase="evaluation")):
        return job.evaluate(step)


def _with_memory(job: Job, state: RunState) -> RunState:
    """The state with what the stage carries, because a checkpoint's plain values are those of `RunState`."""
    return state if job.memory is None else replace(state, stage=job.memory.to_json())


def _save(job: Job, state: RunState, observer: Observer, clock: _Clock) -> RunState:
    """One checkpoint at a time: an earlier one that is on its way is waited for. The state with the time it took, which
    the checkpoint itself cannot hold."""
    _notify_saved(job, observer, wait=True)  # two at once would need room for both, and finish in any order
    folder = job.save(state)
    if folder is not None:
        observer.saved(folder, state)
    return state.spent("saving", clock.lap())


def _notify_saved(job: Job, observer: Observer, wait: bool = False) -> None:
    for state, folder in job.saved(wait):
        observer.saved(folder, state)


def is_over(job: Job, state: RunState) -> bool:
    return not _evaluation_due(job, state) and has_ended(state, job.total_steps, job.patience)


def has_ended(state: RunState, total_steps: int, patience: int | None) -> bool:
    """All steps done, or patience at its end."""
    return state.step >= total_steps or (patience is not None and state.stale >= patience)


def _evaluation_due(job: Job, state: RunState) -> bool:
    return job.evaluate is not None and state.step in job.eval_steps and state.evaluated != state.step


def _evaluate_and_save(job: Job, state: RunState, observer: Observer, clock: _Clock) -> tuple[RunState, bool]:
    """What is due after a step; whether a checkpoint was written."""
    improved = False
    if _evaluation_due(job, state):
        report = _evaluated(job, state.step)
        if report is None:
            return state, False
        previous, state = state.best, state.after_evaluation(report, job.goal, job.min_delta)
        improved = state.best != previous
        observer.evaluation(report, state, improved)
        state = state.spent("evaluation", clock.lap())
    if state.step in job.save_steps or is_over(job, state) or (improved and job.keep_best):
        return _save(job, state, observer, clock), True
    return state, False


def _diverged(report: StepReport, state: RunState, origin: str, max_consecutive: int) -> Diverged:
    where = f"step {report.step}"
    if report.non_finite == "moment":  # not the data's fault, so a rollback around them would not help
        what = f"a moment of the optimizer is not finite ({report.moment}), in spite of finite gradients; {origin}"
        fix = "weights are as before this step; resume from the last checkpoint, and test the memory if it comes again"
        return Diverged(Fault(where, what, fix, code="SF-DIVERGED"))
    bad = "the loss" if report.non_finite == "loss" else "the gradient norm"
    times = f"{len(state.guard.recent)} times in {RECENT} steps"
    if state.guard.consecutive >= max_consecutive:
        times = f"{counted(state.guard.consecutive, 'time')} in a row"
    named = f"examples {example_list(report.examples)}"
    where_from = origin if named in origin else f"{named}; {origin}"  # a step of one micro-batch: the same examples
    what = f"{bad} was not finite, {times}; {where_from}"
    fix = "weights and moments are as before these steps; look at the named module and examples, or lower optim.lr"
    return StepsLost(Fault(where, what, fix, code="SF-DIVERGED"), report.step)
