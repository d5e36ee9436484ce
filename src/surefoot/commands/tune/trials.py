"""Trials of settings: the requests for them, and whether a setting computes the right results.

A setting's first steps are compared with the plain path: eager attention, nothing fused, nothing packed, in fp32 if
that fits the memory, else in the run's own type. A quantized base stays quantized, since otherwise it would be another
model. The first loss tests the forward pass, the first gradient norm the backward pass, and the second loss the update.
Later steps are not compared, because rounding differences grow during training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.commands.tune.attempt import NOT_DONE, Answer, Request
from surefoot.commands.tune.search import Settings, Tried
from surefoot.config.load import check_config
from surefoot.config.overrides import with_settings
from surefoot.planning.fast_paths import PLAINEST
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.memory import fits, usable
from surefoot.planning.plan import OFF, QAT_BLOCKS, RunPlan, diff_plans
from surefoot.runs.make_plan import make_plan
from surefoot.runs.trial import Clock, Rival, Trial
from surefoot.system.errors import NO_MEMORY, EnvironmentFault, Fault, InputError
from surefoot.system.messages import size_text

COMPARED = 2  # steps compared
_WORKERS = "data.workers"  # affects only the speed of a run, not its plan
# Relative tolerances. 16-bit products keep 8 or 11 bits; sums agree to about a hundredth in loss and a few
# hundredths in the norm of a gradient. fp32 paths differ by the order of their sums alone.
LOSS_GATE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
NORM_GATE: Mapping[str, float] = {"fp32": 1e-3, "bf16": 1e-1, "fp16": 5e-2}


@dataclass(frozen=True)
class Numbers:
    """Results of the first steps; None for a non-finite value. compute: type of the products."""

    losses: Sequence[float | None]
    grad_norms: Sequence[float | None]
    compute: str = "fp32"


def failure(found: Numbers, wanted: Numbers) -> str:
    """Why a setting is rejected; empty if it passes. The tolerance is that of the coarser type of both."""
    compute = max(found.compute, wanted.compute, key=LOSS_GATE.__getitem__)
    for name, one, other, gate, count in (
        ("loss", found.losses, wanted.losses, LOSS_GATE[compute], COMPARED),
        ("gradient norm", found.grad_norms, wanted.grad_norms, NORM_GATE[compute], 1),
    ):
        for step, (value, reference) in enumerate(zip(one[:count], other[:count], strict=True), start=1):
            if value is None or reference is None:
                if value is not reference:
                    return f"the {name} of step {step} is not finite"
                continue
            off = abs(value - reference) / max(abs(reference), 1e-8)
            if off > gate:
                return f"the {name} of step {step} is off by {off:.2g}, more than {gate:.2g}"
    return ""


@dataclass(frozen=True)
class Reference:
    """The plain path. config: plain values. compute: type of its matrix products."""

    config: Mapping[str, Any]
    compute: str


def choose_reference(given: Mapping[str, Any], plan: RunPlan, refused: Callable[[Mapping[str, Any]], str]) -> Reference:
    """Choose the plain path. given: the run's config as plain values. refused: why a config cannot run here, or empty.
    Raises EnvironmentFault if the plain path fits the memory in no type."""
    reasons = []
    for compute in dict.fromkeys(("fp32", plan.precision.compute.value)):
        precision = {"compute": compute, **({"base": packed} if (packed := plan.precision.packed) else {})}
        if plan.precision.qat.value != OFF:  # with rounding it is another model than without
            qat, size = plan.precision.qat.value, plan.precision.qat_group
            precision |= {"qat": qat, **({"qat_group_size": size} if size and qat not in QAT_BLOCKS else {})}
        config = with_settings(given, {**PLAINEST, "data.workers": 0, "precision": precision})
        if not (reason := refused(config)):
            return Reference(config, compute)
        reasons.append(f"{compute}: {reason}")
    fix = "lower data.max_length for the search, or set batch.micro and data.packing yourself"
    what = f"the plain path, with which settings are compared, cannot run ({'; '.join(reasons)})"
    raise EnvironmentFault(Fault("tune", what, fix, code="SF-TUNE"))


ROUNDS, _TURNS = 2, 2
# A trial is stopped once its steps took longer than the best one's by this factor, times the largest difference so far
# between two rounds of the same steps. Noise of this machine does not reach that far.
_HOPELESS = 1.1

_CLEAR = 1.1  # factor: a setting that is faster by this much in one turn is faster

Attempt = Callable[[Request, float | None], Answer]


@dataclass(frozen=True)
class Terms:
    """Conditions of trials. steps: timed steps. limit, compiling: seconds after which a trial is stopped, without and
    with compilation. clock: see `run_trial`."""

    steps: int
    limit: float
    compiling: float
    clock: Clock = "wall"


class Trials:
    """attempt: runs a request with a limit in seconds. reference: results of the plain path."""

    def __init__(
        self,
        given: Mapping[str, Any],
        plan: RunPlan,
        lengths: LengthFacts,
        reference: Numbers,
        terms: Terms,
        attempt: Attempt,
    ):
        self._given, self._plan, self._lengths, self._reference = given, plan, lengths, reference
        self._terms, self._attempt = terms, attempt
        self._best: Trial | None = None
        self._spread = 1.0
        self._seen: list[tuple[RunPlan, Tried]] = []
        self.known: tuple[Settings, Answer] | None = None  # a result that need not be measured again

    def look(self, settings: Settings) -> Tried:
        """Return the result of the settings: of their first steps only if they are hopeless, and the earlier result if
        the plan is the same."""
        made = planned(with_settings(self._given, settings), self._plan, self._lengths)
        if isinstance(made, Fault):
            return _failed(settings, str(made), made.code)
        for other, tried in self._seen:
            if tried.settings.get(_WORKERS) == settings.get(_WORKERS) and not diff_plans(other, made):
                return tried
        self._seen.append((made, found := self._first_look(settings)))
        return found

    def _first_look(self, settings: Settings) -> Tried:
        compiles = settings.get("compile", self._plan.compile.value) != "off"
        # A compiled setting is slow until it has seen all shapes, so its first steps show nothing.
        rival = None if self._best is None or compiles else Rival(self._best.paced, _HOPELESS * self._spread)
        return self._look(settings, rival, self._terms.compiling if compiles else self._terms.limit)

    def in_turns(self, one: Tried, other: Tried) -> tuple[Tried, Tried]:
        """Time both again alternately, so that a machine that slows down affects both; returns the best turn of each.
        One turn is enough if `other` is clearly faster."""
        limit = self._terms.limit + self._terms.compiling
        first = second = None
        for _ in range(_TURNS):
            first = _faster(first, self._look(one.settings, None, limit))
            second = _faster(second, self._look(other.settings, None, limit))
            if second.rate > _CLEAR * first.rate:
                break
        assert first is not None
        assert second is not None
        return first, second

    def _look(self, settings: Settings, rival: Rival | None, limit: float) -> Tried:
        if self.known is not None and self.known[0] == settings:
            (_, answer), self.known = self.known, None
        else:
            answer = self._attempt(
                Request(
                    with_settings(self._given, settings),
                    self._terms.steps,
                    ROUNDS,
                    rival=rival,
                    clock=self._terms.clock,
                ),
                limit,
            )
        if answer.trial is None:
            return _failed(settings, answer.failure, answer.code)
        return self._judged(settings, answer.trial)

    def _judged(self, settings: Settings, trial: Trial) -> Tried:
        compute = str(settings.get("precision.compute", self._plan.precision.compute.value))
        wrong = failure(Numbers(trial.losses, trial.grad_norms, compute), self._reference)
        self._spread = max(self._spread, trial.spread)
        # It was stopped early, so its few steps are compared with the same steps of the best setting.
        if trial.beside is not None:
            assert self._best is not None  # only the best setting can have stopped it
            rate = self._best.rate * trial.beside  # steps differ in tokens, so its own rate would not compare
            return Tried(settings, rate, trial.memory, failure=wrong, early=True, held_up=trial.held_up)
        if not wrong and (self._best is None or trial.rate > self._best.rate):
            self._best = trial
        waiting = sum(trial.waiting) / sum(trial.seconds)
        return Tried(settings, trial.rate, trial.memory, waiting, wrong, held_up=trial.held_up)


def planned(config: Mapping[str, Any], plan: RunPlan, lengths: LengthFacts) -> RunPlan | Fault:
    """The plan, or the fault with which the planner or its memory forecast refuses. plan: has the measurements."""
    try:
        made = make_plan(check_config(config), lengths=lengths, measurements=plan.measurements)
    except InputError as error:
        return error.faults[0]
    if fits(made.memory):
        return made
    needed, room = size_text(made.memory.total), size_text(usable(made.memory.available))
    return Fault("", f"not enough memory: {needed} of {room}, forecast", code=NO_MEMORY)


def refusal(config: Mapping[str, Any], plan: RunPlan, lengths: LengthFacts) -> str:
    """Why `planned` refuses, empty if it does not."""
    found = planned(config, plan, lengths)
    return str(found) if isinstance(found, Fault) else ""


def _failed(settings: Settings, why: str, code: str) -> Tried:
    return Tried(settings, failure=why, short_of_memory=code == NO_MEMORY, unfinished=code == NOT_DONE)


def _faster(one: Tried | None, other: Tried) -> Tried:
    return other if one is None or other.rate > one.rate else one
