"""Settings become trials of one config on one machine, and trials become what the search compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.commands.tune.attempt import NOT_DONE, Answer, Request
from surefoot.commands.tune.gate import Numbers, failure
from surefoot.commands.tune.search import Tried
from surefoot.commands.tune.space import Settings, beside_the_plan
from surefoot.config.load import check_config
from surefoot.config.overrides import with_settings
from surefoot.planning.measurements import LengthFacts
from surefoot.planning.memory import fits, usable
from surefoot.planning.plan import RunPlan, diff_plans
from surefoot.runs.plan import make_plan
from surefoot.runs.trial import Clock, Rival, Trial
from surefoot.system.errors import NO_MEMORY, Fault, InputError
from surefoot.system.messages import size_text

ROUNDS = 2
# A trial is given up where its steps have taken so many times as long as the best one's, times the most that two rounds
# of the same steps have differed so far: noise of this machine, today, does not reach that far.
_HOPELESS = 1.1

_CLEAR = 1.1  # times: so much faster in one turn is no chance

Attempt = Callable[[Request, float | None], Answer]


@dataclass(frozen=True)
class Terms:
    """How trials are taken. steps: timed ones. limit, compiling: seconds after which a trial is given up, compiling
    where it compiles. clock: see `run_trial`."""

    steps: int
    limit: float
    compiling: float
    clock: Clock = "wall"


class Trials:
    """attempt: takes a request and a limit in seconds. reference: what the plain path computes."""

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
        self.known: tuple[Settings, Answer] | None = None  # one that need not be tried again

    def look(self, settings: Settings) -> Tried:
        """What came of the settings; where they are hopeless, of their first steps; where they plan what others did
        before, what came of those."""
        made = planned(with_settings(self._given, settings), self._plan, self._lengths)
        if isinstance(made, Fault):
            return _failed(settings, str(made), made.code)
        for other, tried in self._seen:
            if beside_the_plan(tried.settings) == beside_the_plan(settings) and not diff_plans(other, made):
                return tried
        self._seen.append((made, found := self._first_look(settings)))
        return found

    def _first_look(self, settings: Settings) -> Tried:
        compiles = settings.get("compile", self._plan.compile.value) != "off"
        # What compiles is slow until it has seen all shapes, and says nothing before.
        rival = None if self._best is None or compiles else Rival(self._best.paced, _HOPELESS * self._spread)
        return self._look(settings, rival, self._terms.compiling if compiles else self._terms.limit)

    def in_turns(self, one: Tried, other: Tried, turns: int = 2) -> tuple[Tried, Tried]:
        """Both again, one after the other, so that a machine that slows down slows both; the best turn of each. The
        first turn is enough where `other` is clearly faster."""
        limit = self._terms.limit + self._terms.compiling
        first = second = None
        for _ in range(turns):
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
        if trial.beside is not None:
            assert self._best is not None  # who else would have beaten it
            rate = self._best.rate * trial.beside  # steps differ in tokens: its own few would not compare
            return Tried(settings, rate, trial.memory, failure=wrong, early=True, held_up=trial.held_up)
        if not wrong and (self._best is None or trial.rate > self._best.rate):
            self._best = trial
        waiting = sum(trial.waiting) / sum(trial.seconds)
        return Tried(settings, trial.rate, trial.memory, waiting, wrong, held_up=trial.held_up)


def planned(config: Mapping[str, Any], plan: RunPlan, lengths: LengthFacts) -> RunPlan | Fault:
    """The plan, or why the planner, or its forecast of the memory, refuses. plan: has the measurements."""
    try:
        made = make_plan(check_config(config), lengths=lengths, measurements=plan.measurements)
    except InputError as error:
        return error.faults[0]
    if fits(made.memory):
        return made
    needed, room = size_text(made.memory.total), size_text(usable(made.memory.available))
    return Fault("", f"not enough memory: {needed} of {room}, forecast", code=NO_MEMORY)


def refusal(config: Mapping[str, Any], plan: RunPlan, lengths: LengthFacts) -> str:
    """Why `planned` has none, empty where it has."""
    found = planned(config, plan, lengths)
    return str(found) if isinstance(found, Fault) else ""


def _failed(settings: Settings, why: str, code: str) -> Tried:
    return Tried(settings, failure=why, short_of_memory=code == NO_MEMORY, unfinished=code == NOT_DONE)


def _faster(one: Tried | None, other: Tried) -> Tried:
    return other if one is None or other.rate > one.rate else one
