"""A training method as a value: which data, which loss, which batches, which models.

A method is two rows under the word that the config's `stage` has: its facts, without torch, which config, planning and
report read as well (`surefoot.method_facts`), and its functions (`surefoot.methods.table`). Everything else that a run
does is the same for all methods.
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
    """An evaluation by the method itself.

    samples: (prompt, answer) pairs to read.
    """

    report: EvalReport
    samples: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Task:
    """What this run learns: a method's loss, and the batches of every step, as the plan lays them out.

    step_batches: step (from 1) -> the micro-batches of all ranks, longest first; a pure function, which threads may
        call ahead.
    step_places: step -> where the examples lie among the training data that it asks for, in their order: all that the
        models are run for before it, else those that it learns from.
    data_step: which step's data a step learns from: its own, but after a rollback.
    begins_at: a data step -> the first one from there on whose data do not belong to an earlier one.
    ready: what has to be done with the batches of a step once the model is loaded (rollouts, reference
        log-probabilities), on the main thread; None: nothing.
    eval_batches: all of the evaluation set, None where there is none.
    step_tokens: step -> real input tokens, as far as they are known before.
    memory: what is carried from step to step.
    bounds: see `StepSettings`.
    evaluate: what evaluates in place of the objective over eval_batches; step, and whether to give up -> its result,
        None when it gave up.
    write: what goes into every checkpoint beside the models.
    reward: the function with which a Python caller scores answers.
    keep: is given every answer that was drawn and scored, for the run folder.
    check_end: called after the last step. Raises NothingLearned where there is nothing to publish.
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
    ready: Callable[[int, Sequence[Weighted]], Sequence[Weighted]] | None = None
    memory: Memory | None = None
    bounds: Mapping[str, float] = field(default_factory=dict)
    evaluate: Callable[[int, Callable[[], bool]], Measured | None] | None = None
    write: Callable[[Path], None] | None = None
    reward: RewardFunction | None = None
    keep: Callable[[Sequence[Mapping[str, Any]]], None] = lambda answers: None
    check_end: Callable[[], None] = lambda: None

    @property
    def evaluates(self) -> bool:
        """Whether there is anything to evaluate on."""
        return self.eval_batches is not None or self.evaluate is not None

    def examples(self, step: int) -> tuple[RecordName, ...]:
        """The names of what `step_places` says."""
        return tuple(self.data.train.name(int(place)) for place in self.step_places(step))

    def batches(self, step: int) -> Sequence[Weighted]:
        """What step `step` learns from; runs the model where the method does."""
        found = self.step_batches(step)
        return found if self.ready is None else self.ready(step, found)


@dataclass(frozen=True)
class Built:
    """The models of a run.

    model: what the engine holds and the objective is given.
    policy: the language model in it, which answers prompts; of a reward model its backbone.
    groups: name -> whether a parameter, by its name in `model`, belongs to it; each that trains to exactly one; the
        first group's rate is optim.lr.
    write: weights and config into a folder; the tokenizer is written beside them.
    load: what a checkpoint holds beside the policy's own weights.
    verified: what was found in building it.
    """

    model: nn.Module
    policy: nn.Module
    groups: Mapping[str, Callable[[str], bool]]
    write: Callable[[Path], None]
    load: Callable[[Path], None]
    verified: Mapping[str, Any]


ONE_GROUP: Mapping[str, Callable[[str], bool]] = {ALL: lambda name: True}
ACTOR, CRITIC = "actor", "critic"  # the groups of stage ppo


class Prepare(Protocol):
    """Read, render, tokenise and audit the data. Raises InputError for bad data."""

    def __call__(
        self,
        config: RunConfig,
        tokens: TokenizerPlan,
        tokenizer: PreTrainedTokenizerBase,
        *,
        read_record: ReadRecord | None = None,
    ) -> PreparedData: ...


class Notify(Protocol):
    """Tells the user one sentence; a caution is kept with the run's events."""

    def __call__(self, sentence: str, *, caution: bool = True) -> None: ...


def ignore(sentence: str, *, caution: bool = True) -> None:
    """A `Notify` that tells nobody."""


class RunInputs(Protocol):
    """What a method reads of a run before its models are loaded; `surefoot.runs.prepared.PreparedRun` has it."""

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

    plan: as it is carried out, without the fast paths that differ on these models.
    model: what the objective is given.
    policy: the language model in it.
    engine: holds the parameters and moves them.
    settings: of every step.
    state: where the run goes on.
    write_weights: weights and config into a folder, as others read them.
    checkpoint: what the run goes on from; None at the start.
    verified: what was found when reality was held against the plan.
    share: engine and elements of this rank, for environment.json.
    packing_fault: why the model cannot take packed rows, where that had to be tried before its weights were shared
        out; empty where it can or nobody tried.
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
    packing_fault: str = ""


class Start(Protocol):
    """The task with its models, which it may run. notify: also called during the steps."""

    def __call__(self, run: RunInputs, loaded: LoadedModels, notify: Notify) -> Task: ...


@dataclass(frozen=True)
class MethodFunctions:
    """What a method computes; what it needs is its row of `surefoot.method_facts.methods.METHODS`.

    prepare: reads, renders, tokenises and audits the data.
    task: the data under a plan.
    build: from the policy, with its adapter, and the folder of its base to all models; None: the policy is all.
    start: the task with its models, before step 1; None: it needs none.
    """

    prepare: Prepare
    task: Callable[[RunConfig, RunPlan, PreparedData], Task]
    build: Callable[[RunConfig, RunPlan, nn.Module, Path], Built] | None = None
    start: Start | None = None
