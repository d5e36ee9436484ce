"""A run before its models are loaded, as one value; its durations in steps, and its learning-rate schedules.

The order of the examples is a pure function of the seed, so even a duration in tokens is known in steps before the run
starts. All later parts of a run take a `PreparedRun`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.config.types import Duration
from surefoot.data.prepare import PreparedData
from surefoot.methods.losses.sft import with_neftune
from surefoot.methods.method import CRITIC, LoadedModels, Notify, Task
from surefoot.methods.table import functions_of
from surefoot.planning.plan import RunPlan
from surefoot.runs.revisions import Commits
from surefoot.runs.run_folder import FolderState
from surefoot.system.errors import Fault, InputError
from surefoot.training.guard import Rollback, data_step
from surefoot.training.optimizer import Schedule


@dataclass(frozen=True)
class PreparedRun:
    """Everything that is known before the model is loaded and the run folder is changed.

    config: the config with hub branches replaced by commits.
    existing: what was found in the run folder.
    base: folder of the base model.
    identity: see `run_identity`.
    """

    config: RunConfig
    commits: Commits
    existing: FolderState
    plan: RunPlan
    base: Path
    tokenizer: PreTrainedTokenizerBase
    task: Task
    timetable: Timetable
    identity: dict[str, Any]

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.existing.folder

    @property
    def total_steps(self) -> int:
        return self.timetable.total_steps

    @property
    def resumed(self) -> bool:
        """Whether the run continues from a checkpoint."""
        return self.existing.checkpoint is not None


_MOST = 10**8  # optimizer steps of a run
_FIRST = 10  # steps whose tokens tell how far a length in tokens may reach


def make_task(config: RunConfig, plan: RunPlan, data: PreparedData, rollbacks: Sequence[Rollback] = ()) -> Task:
    """Make the task of the data under a plan, in the order of a run with these rollbacks."""
    task = functions_of(config.stage).task(config, plan, data)
    if not rollbacks:
        return task
    batches, places, order = task.step_batches, task.step_places, partial(data_step, tuple(rollbacks))
    return replace(
        task,
        step_batches=lambda step: batches(order(step)),
        step_places=lambda step: places(order(step)),
        data_step=order,
    )


def with_noise(config: RunConfig, task: Task) -> Task:
    """Return the task with optim.neftune_alpha in its objective."""
    alpha = config.optim.neftune_alpha
    return task if alpha is None else replace(task, objective=with_neftune(task.objective, alpha))


def with_models(run: PreparedRun, loaded: LoadedModels, notify: Notify) -> PreparedRun:
    """Give the run's task its models, for stages that generate or score with them. notify: called during the steps."""
    start = functions_of(run.config.stage).start
    if start is None:
        return run
    task = start(run, loaded, notify)
    made = task.objective is not run.task.objective  # and not only completed: the method's own again, without the noise
    return replace(run, task=with_noise(run.config, task) if made else task)


@dataclass(frozen=True)
class Timetable:
    """Totals and events in optimizer steps, counted from 1; an evaluation at step 0 precedes training. The last step is
    always evaluated and saved."""

    steps_per_epoch: int
    total_steps: int
    eval_steps: frozenset[int]
    save_steps: frozenset[int]

    def epoch(self, step: int) -> float:
        """Epochs completed after `step` steps."""
        return step / self.steps_per_epoch

    def next_step(self, done: int) -> int:
        """The step after `done` steps; at the end of the run, the last step again (callers inspect its batches)."""
        return min(done + 1, self.total_steps)


def make_timetable(
    duration: Duration,
    eval_every: Duration | None,
    save_every: Duration,
    steps_per_epoch: int,
    tokens_of_step: Callable[[int], int],
    *,
    eval_at_start: bool = False,
) -> Timetable:
    """Convert the run's durations to optimizer steps.

    steps_per_epoch: optimizer steps per pass over the examples.
    tokens_of_step: real input tokens of step 1, 2, …; called only if a duration is given in tokens.
    eval_at_start: whether to evaluate at step 0.
    """
    total = length_in_steps("duration", duration, steps_per_epoch, tokens_of_step)

    def due(every: Duration | None) -> frozenset[int]:
        steps = _multiples(every, steps_per_epoch, tokens_of_step, total) if every else ()
        return frozenset({total, *steps})

    start = frozenset({0} if eval_at_start else ())
    return Timetable(steps_per_epoch, total, due(eval_every) | start, due(save_every))


def length_in_steps(key: str, duration: Duration, steps_per_epoch: int, tokens_of_step: Callable[[int], int]) -> int:
    """Convert a duration to optimizer steps, at least one. Raises InputError above _MOST. key: of the config."""
    far = False
    if duration.unit == "tokens":  # as the first steps have; one by one, so many would take hours to count
        far = duration.count * _FIRST > _MOST * max(1, sum(tokens_of_step(step) for step in range(1, _FIRST + 1)))
    length = None if far else next(_multiples(duration, steps_per_epoch, tokens_of_step, _MOST), None)
    if length is None:
        what = f"{duration} are more than {_MOST:,} optimizer steps"
        raise InputError(Fault(key, what, "shorten it", code="SF-CONFIG-CONFLICT"))
    return length


def _multiples(every: Duration, steps_per_epoch: int, tokens_of_step: Callable[[int], int], most: int) -> Iterator[int]:
    """Yield the steps up to `most` at which 1, 2, 3, … times `every` have passed; strictly increasing."""
    if every.unit == "tokens":
        yield from _token_multiples(every.count, tokens_of_step, most)
        return
    last = 0
    for number in itertools.count(1):
        length = every.count * number * (1 if every.unit == "steps" else steps_per_epoch)
        if length >= most + 1:  # infinite as well, which has no integer
            return
        step = max(1, round(length))
        if last < step <= most:
            last = step
            yield step


def _token_multiples(every: float, tokens_of_step: Callable[[int], int], most: int) -> Iterator[int]:
    tokens, threshold = 0, every
    for step in range(1, most + 1):
        tokens += tokens_of_step(step)
        if tokens >= threshold:
            threshold = every * (tokens // every + 1)
            yield step


def make_schedules(run: PreparedRun, groups: Collection[str]) -> dict[str, Schedule]:
    """Learning-rate schedule of each parameter group: the same shape, with each group's own peak."""
    first = make_schedule(run.config, run.task, run.timetable)
    peaks = {CRITIC: run.config.ppo.critic_lr}
    return {name: replace(first, peak=peaks.get(name, first.peak)) for name in groups}


def make_schedule(config: RunConfig, task: Task, timetable: Timetable) -> Schedule:
    """Convert warmup and decay fractions to steps, rounded; a warm-up from 0 is rounded up, as in transformers."""
    optim, total = config.optim, timetable.total_steps
    if isinstance(optim.warmup, Duration):
        warmup = length_in_steps("optim.warmup", optim.warmup, timetable.steps_per_epoch, task.step_tokens)
    else:
        warmup = math.ceil(optim.warmup * total) if optim.warmup_from_zero else round(optim.warmup * total)
    decay = round(optim.decay * total)
    return Schedule(optim.schedule, optim.lr, total, warmup, decay, optim.warmup_from_zero, optim.floor)
