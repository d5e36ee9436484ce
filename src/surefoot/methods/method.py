"""A training method as a value: data, loss, batches and models.

A method is two rows under the value of the config's `stage`: its facts, without torch, which config, planning and
report also read (`surefoot.method_facts`), and its functions (`surefoot.methods.table`). Everything else in a run is
the same for all methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import nn
from transformers import PreTrainedTokenizerBase

from surefoot.config.schema import RunConfig
from surefoot.data.batching.batch import RecordName, Weighted
from surefoot.data.prepare import PreparedData
from surefoot.data.tokenize.tokenize_file import ReadRecord
from surefoot.planning.plan import RunPlan, TokenizerPlan
from surefoot.system.posting import Server
from surefoot.training.checkpoint import Checkpoint
from surefoot.training.engine import ALL, Engine
from surefoot.training.loop import Memory
from surefoot.training.objective import Objective
from surefoot.training.report import EvalReport
from surefoot.training.state import RunState
from surefoot.training.step import StepSettings

RewardFunction = Callable[[Sequence[str], Sequence[str]], Sequence[float]]  # prompts, responses -> scores


@dataclass(frozen=True)
class Measured:
    """Result of a method's own evaluation.

    samples: (prompt, answer) pairs to show.
    """

    report: EvalReport
    samples: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Task:
    """What a run trains on: a method's loss, and the batches of every step as laid out by the plan.

    step_batches: step (from 1) -> the micro-batches of all ranks, longest first; a pure function that threads may call
        ahead. `batches` adds what `ready` computes.
    step_places: step -> indices of the training examples it uses, in order: all those that the models process before
        it, or else those it learns from.
    data_step: step -> step whose data it uses: the same except after a rollback.
    begins_at: data step -> the next data step whose data is independent of earlier ones.
    ready: processes the batches of a step on the main thread once the model is loaded (rollouts, reference
        log-probabilities); None: nothing to do.
    eval_batches: batches of the whole evaluation set; None if there is none.
    eval_ready: processes a batch of this rank before it is evaluated.
    step_tokens: step -> real input tokens, as far as known in advance.
    memory: state carried from step to step.
    bounds: see `StepSettings`.
    evaluate: replaces the evaluation of the objective over eval_batches: (step, give_up) -> result, None if it gave up.
    write: writes additional files into every checkpoint.
    reward: a Python caller's reward function.
    keep: called with every scored answer, for the run folder.
    check_end: called after the last step. Raises NothingLearned if there is nothing to publish.
    servers: that are asked before and during the steps.
    close: called when no step follows, also after an error; waits for threads that the method has begun.
    """

    objective: Objective
    data: PreparedData
    steps_per_epoch: int
    step_batches: Callable[[int], Sequence[Weighted]]
    step_places: Callable[[int], np.ndarray]
    step_tokens: Callable[[int], int]
    eval_batches: Callable[[], Iterator[Weighted]] | None
    data_step: Callable[[int], int] = lambda step: step
    begins_at: Callable[[int], int] = lambda step: step
    eval_ready: Callable[[Weighted], Weighted] = lambda batch: batch
    ready: Callable[[int, Sequence[Weighted]], Sequence[Weighted]] | None = None
    memory: Memory | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    evaluate: Callable[[int, Callable[[], bool]], Measured | None] | None = None
    write: Callable[[Path], None] | None = None
    reward: RewardFunction | None = None
    keep: Callable[[Sequence[Mapping[str, Any]]], None] = lambda answers: None
    check_end: Callable[[], None] = lambda: None
    servers: tuple[Server, ...] = ()
    close: Callable[[], None] = lambda: None

    @property
    def evaluates(self) -> bool:
        """Whether there is something to evaluate on."""
        return self.eval_batches is not None or self.evaluate is not None

    def examples(self, step: int) -> tuple[RecordName, ...]:
        """Names of the examples of `step_places`."""
        return tuple(self.data.train.name(int(place)) for place in self.step_places(step))

    def give_up(self) -> None:
        """End all requests to servers, and refuse further ones. For another thread than theirs."""
        for one in self.servers:
            one.requests.give_up()

    def batches(self, step: int) -> Sequence[Weighted]:
        """Return the batches of a step; runs the model if the method needs it."""
        found = self.step_batches(step)
        return found if self.ready is None else self.ready(step, found)


@dataclass(frozen=True)
class Built:
    """The models of a run.

    model: the model that the engine manages and the objective gets.
    policy: the language model in it, which generates; for a reward model its backbone.
    groups: name -> whether a parameter, by its name in `model`, belongs to it; each trained one belongs to exactly one
        group; the first group's learning rate is optim.lr.
    write: writes weights and config into a folder, without the tokenizer.
    load: loads what a checkpoint contains besides the policy's weights.
    verified: results of checks while building.
    """

    model: nn.Module
    policy: nn.Module
    groups: Mapping[str, Callable[[str], bool]]
    write: Callable[[Path], None]
    load: Callable[[Path], None]
    verified: Mapping[str, Any]


ONE_GROUP: Mapping[str, Callable[[str], bool]] = {ALL: lambda name: True}
ACTOR, CRITIC = "actor", "critic"  # parameter groups of stage ppo


class Prepare(Protocol):
    """Read, render, tokenize and audit the data. Raises InputError for bad data."""

    def __call__(
        self,
        config: RunConfig,
        tokens: TokenizerPlan,
        tokenizer: PreTrainedTokenizerBase,
        *,
        read_record: ReadRecord | None = None,
    ) -> PreparedData: ...


class Notify(Protocol):
    """Show the user a sentence; a caution is also saved in the run's events."""

    def __call__(self, sentence: str, *, caution: bool = True) -> None: ...


def ignore(sentence: str, *, caution: bool = True) -> None:
    """A `Notify` that does nothing."""


class RunInputs(Protocol):
    """What a method reads of a run before its models are loaded; implemented by
    `surefoot.runs.prepared.PreparedRun`."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def plan(self) -> RunPlan: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def task(self) -> Task: ...
    @property
    def total_steps(self) -> int: ...


@dataclass(frozen=True)
class LoadedModels:
    """Models and engine of a run, ready for its first step.

    plan: the final plan, without fast paths that differ on these models.
    model: the model that the objective gets.
    policy: the language model in it.
    engine: manages and updates the parameters.
    settings: settings of every step.
    state: state to start or resume from.
    write_weights: writes weights and config into a folder, in the standard format.
    checkpoint: checkpoint the run resumes from; None at the start.
    verified: results of the checks against the plan.
    share: engine and number of elements of this rank, for environment.json.
    tested: record of each fast path that is settled by a test before sharding, by the path's name.
    """

    plan: RunPlan
    model: nn.Module
    policy: nn.Module
    engine: Engine
    settings: StepSettings
    state: RunState
    write_weights: Callable[[Path], None]
    checkpoint: Checkpoint | None
    verified: dict[str, Any]
    share: dict[str, Any]
    tested: Mapping[str, dict[str, Any]] = field(default_factory=dict)


class Start(Protocol):
    """Complete the task with its models. notify: also called during the steps."""

    def __call__(self, run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task: ...


@dataclass(frozen=True)
class MethodFunctions:
    """Functions of a method; its facts are a row of `surefoot.method_facts.methods.METHODS`.

    prepare: reads, renders, tokenizes and audits the data.
    task: makes the task of the data under a plan.
    build: makes all models from the policy, with its adapter, and the folder of its base; None: there is only the
        policy.
    start: completes the task with its models before step 1; None: nothing to do.
    """

    prepare: Prepare
    task: Callable[[RunConfig, RunPlan, PreparedData], Task]
    build: Callable[[RunConfig, RunPlan, nn.Module, Path], Built] | None = None
    start: Start | None = None
