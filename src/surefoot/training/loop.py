"""The training loop: step, evaluate, save and stop, in this order, for every training method.

The loop knows nothing about methods, model families or YAML: it is given functions and calls an observer after each
event.
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
from surefoot.system.posting import GivenUp
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
    """Callbacks after each event, in order. They may write logs but must not change the run."""

    def step(self, report: StepReport, state: RunState) -> None: ...
    def evaluation(self, report: EvalReport, state: RunState, improved: bool) -> None: ...
    def saved(self, folder: Path, state: RunState) -> None: ...


class Memory(Protocol):
    """State that a method carries between steps besides weights, moments and `RunState`; saved in every checkpoint."""

    def to_json(self) -> Mapping[str, Any]:
        """Return the plain values, for state.json."""
        ...

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors by name, for a file of their own; may be empty."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Return metrics of the step whose batches were made last, for its report."""
        ...

    def learned(self, report: StepReport) -> None:
        """Update the state after a step. Raises Diverged if training cannot continue."""
        ...


@dataclass(frozen=True)
class Job:
    """Everything the loop needs to run. Steps count from 1.

    batches: step -> its micro-batches; may run the model. Raises GivenUp, on all ranks, if it was aborted because the
        run is to stop.
    schedules: parameter group -> learning rate schedule.
    evaluate: step -> report, or None if it was aborted because the run is to stop; None without evaluation.
    eval_steps, save_steps: steps after which to evaluate, and to save a checkpoint.
    save: writes a checkpoint of engine and state; returns None while it is still being written in the background.
    keep_best: whether to save a checkpoint after an evaluation that is the best so far.
    goal: the evaluation result that decides which checkpoint is best.
    max_consecutive: allowed non-finite steps in a row.
    max_recent: allowed non-finite steps among the last `guard.RECENT` steps.
    clip_spikes: whether to scale outlier gradients down to the norms of the steps before.
    patience: evaluations without improvement before the run stops early; None disables early stopping.
    min_delta: smallest change that counts as an improvement, in units of the goal.
    watch: step -> timer for its parts.
    memory: state that the method carries between steps, if any.
    check_every: steps between two comparisons of the replicas' weights; None if the engine has no replicas.
    recorder: records failures; set on all ranks or on none.
    saved: returns (state, folder) of checkpoints finished since the last call; saved(True) waits for one that is being
        written. Raises the error of a checkpoint that failed.
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
    """Train from `state` to the last step, until early stopping, or until a signal asks to stop. On return the last
    checkpoint is complete.

    Raises StepsLost after `max_consecutive` non-finite steps in a row or more than `max_recent` recent ones, and
    Diverged for a non-finite optimizer moment; the last checkpoint is left untouched.
    """
    clock = _Clock()
    outcome = _step_until_over(job, state, observer, stop, clock)
    _notify_saved(job, observer, wait=True)
    return replace(outcome, state=outcome.state.spent("saving", clock.lap()))


class _Clock:
    """Lap timer, so that every second of the loop is attributed to exactly one activity."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Return the seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def _step_until_over(job: Job, state: RunState, observer: Observer, stop: StopRequest, clock: _Clock) -> Outcome:
    saved = True  # before step 1 there is nothing to save
    if _evaluation_due(job, state):  # the previous session stopped between a step and its evaluation
        state, saved = _evaluate_and_save(job, state, observer, stop, clock)
        if not saved and stop.requested:
            return Outcome(state, "interrupted")
    while not is_over(job, state):
        step = state.step + 1
        watch = job.watch(step)
        try:
            with _recorded(job, Attempt(step, phase="batches")), watch("data"):
                micro_batches = job.batches(step)
        except GivenUp:
            return Outcome(state if saved else _save(job, state, observer, clock), "interrupted")
        state = state.spent("batches", clock.lap())
        lr = {name: schedule.rate(step - 1) for name, schedule in job.schedules.items()}
        attempt = Attempt(step, micro_batches, lr, state.scale)
        report = _recorded_step(job, attempt, spike_ceiling(state.norms) if job.clip_spikes else None, watch)
        method_error: Diverged | None = None
        if job.memory is not None:
            method_error = _update_memory(job, job.memory, attempt, report)
            report = replace(report, metrics={**job.memory.metrics(), **report.metrics})
        state = state.after_step(report)
        observer.step(report, state)  # log the step before raising, so that the log ends with the failing step
        if method_error is not None:
            raise method_error
        over = _is_lost(job, state, report)
        if over or (job.recorder is not None and report.decision == "non_finite" and state.guard.consecutive == 1):
            # The first of several bad steps is recorded too: no weight has changed since it began.
            origin = look_into(job.engine, job.objective, job.settings, attempt, report, job.recorder)
            if over:
                raise _diverged(report, state, origin, job.max_consecutive)
        # Before a checkpoint can be written: one of ranks that differ would look intact.
        if job.check_every and step % job.check_every == 0:
            job.engine.check_replicas()
        _notify_saved(job, observer)
        stop.agree()  # once per step, at the same place on all ranks; else one saves while another runs the next step
        # The step's own seconds are in `state.seconds`.
        state = state.spent("other", clock.lap() - report.seconds)
        saved = False
        if not stop.requested:
            requests = stop.take_requests()
            if "evaluate" in requests and not _evaluation_due(job, state):
                # Only shown: an evaluation requested by a signal must not become "best", or the run would differ from
                # one without the signal.
                if (evaluation := _evaluated(job, state.step, stop)) is not None:
                    observer.evaluation(evaluation, state, improved=False)
                state = state.spent("evaluation", clock.lap())
            state, saved = _evaluate_and_save(job, state, observer, stop, clock)
            if "save" in requests and not saved:
                state, saved = _save(job, state, observer, clock), True
        # A run whose last checkpoint is saved has finished, whatever signal arrived meanwhile.
        if stop.requested and not (saved and is_over(job, state)):
            if not saved:
                state = _save(job, state, observer, clock)
            return Outcome(state, "interrupted")
    return Outcome(state, "finished" if state.step >= job.total_steps else "early_stopped")


def _is_lost(job: Job, state: RunState, report: StepReport) -> bool:
    guard = state.guard
    permanent = report.non_finite == "moment"  # other data would not repair it
    return report.decision == "non_finite" and (
        permanent or guard.consecutive >= job.max_consecutive or len(guard.recent) > job.max_recent
    )


@contextmanager
def _recorded(job: Job, attempt: Attempt) -> Iterator[None]:
    """Record exceptions for a replay. A SurefootError is a deliberate error with its own message, not a crash."""
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


def _update_memory(job: Job, memory: Memory, attempt: Attempt, report: StepReport) -> Diverged | None:
    """Update the method's state; return the error if it cannot continue, to be raised after the step is logged."""
    try:
        with _recorded(job, replace(attempt, phase="memory")):
            memory.learned(report)
    except Diverged as error:
        return error
    return None


def _evaluated(job: Job, step: int, stop: StopRequest) -> EvalReport | None:
    if job.evaluate is None:
        return None
    try:
        with _recorded(job, Attempt(step, phase="evaluation")):
            return job.evaluate(step)
    except GivenUp:
        stop.agree()
        return None


def _save(job: Job, state: RunState, observer: Observer, clock: _Clock) -> RunState:
    """Save a checkpoint; return the state with the time it took, which the checkpoint itself cannot contain."""
    _notify_saved(job, observer, wait=True)  # two at once would need disk space for both and could finish out of order
    if job.memory is not None:
        state = replace(state, stage=job.memory.to_json())
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
    """Whether all steps are done or early stopping has run out of patience."""
    return state.step >= total_steps or (patience is not None and state.stale >= patience)


def _evaluation_due(job: Job, state: RunState) -> bool:
    return job.evaluate is not None and state.step in job.eval_steps and state.evaluated != state.step


def _evaluate_and_save(
    job: Job, state: RunState, observer: Observer, stop: StopRequest, clock: _Clock
) -> tuple[RunState, bool]:
    """Do the evaluation and checkpoint that are due; return the new state and whether a checkpoint was saved."""
    improved = False
    if _evaluation_due(job, state):
        report = _evaluated(job, state.step, stop)
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
    if report.non_finite == "moment":  # the data did not cause it, so a rollback that skips them would not help
        what = f"an optimizer moment is not finite ({report.moment}) although all gradients were finite; {origin}"
        fix = "the weights did not change in this step; resume from the last checkpoint; if it recurs, test the memory"
        return Diverged(Fault(where, what, fix, code="SF-DIVERGED"))
    bad = "the loss" if report.non_finite == "loss" else "the gradient norm"
    times = f"{len(state.guard.recent)} times in {RECENT} steps"
    if state.guard.consecutive >= max_consecutive:
        times = f"{counted(state.guard.consecutive, 'time')} in a row"
    named = f"examples {example_list(report.examples)}"
    cause = origin if named in origin else f"{named}; {origin}"  # with one micro-batch, `origin` lists the same ones
    what = f"{bad} was not finite, {times}; {cause}"
    fix = "weights and moments did not change in these steps; inspect the module and examples, or lower optim.lr"
    return StepsLost(Fault(where, what, fix, code="SF-DIVERGED"), report.step)
