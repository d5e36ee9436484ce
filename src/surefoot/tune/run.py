"""`surefoot tune`: plan, search, decide, and the config that comes out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot import hardware
from surefoot.config.load import check_config
from surefoot.config.nested import put
from surefoot.errors import EnvironmentFault, Fault, InputError
from surefoot.planning.measurements import LengthFacts, measurements_from_json
from surefoot.planning.memory import fits, readable, usable
from surefoot.planning.plan import RunPlan
from surefoot.report.silent import silent_console
from surefoot.stages.custom import NOTHING
from surefoot.stages.lengths import length_facts
from surefoot.stages.planned import make_plan
from surefoot.stages.prepare import prepare
from surefoot.stages.run_folder import Claim
from surefoot.stages.trial import Trial
from surefoot.tune.attempt import Answer, attempt
from surefoot.tune.gate import Numbers, failure
from surefoot.tune.search import GAIN, Search, Tried
from surefoot.tune.space import Settings, Space, given_keys, make_space

# What every setting is held against: products in fp32, attention by the textbook, nothing fused, nothing packed.
PLAIN: Settings = {
    "precision": {"compute": "fp32"},
    "attention": {"implementation": "eager"},
    "data.packing": "off",
    "kernels.adapter": "plain",
    "kernels.loss": "plain",
    "kernels.last_block": "plain",
    "kernels.pointwise": "plain",
    "compile": "off",
    "data.workers": 0,
}
_ROUNDS = 2
_FEWEST, _MOST = 2, 12  # timed steps of a trial
_PATIENCE = 4.0  # times the first trial's whole time: what takes longer is not the fastest
_LEAST_LIMIT = 60.0  # seconds
_COMPILING = 30.0  # seconds that compiling may add to a trial


@dataclass(frozen=True)
class Tuned:
    """start, best: as they were measured last, in turns. config: plain values, what was given and what was found.
    tried: all, in order. left_out: key and why it was not varied."""

    start: Tried
    best: Tried
    config: dict[str, Any]
    tried: tuple[Tried, ...]
    left_out: tuple[tuple[str, str], ...]
    steps: int

    @property
    def gain(self) -> float:
        return self.best.rate / self.start.rate


def tune(
    given: Mapping[str, Any],
    *,
    seconds: float,
    told: Callable[[Tried], None],
    said: Callable[[str], None],
) -> Tuned:
    """given: the config as plain values, short forms written out. seconds: of a trial's timed steps, about. told: of
    every setting as it was tried. said: what is going on.

    Raises what a run of the config would, and EnvironmentFault where the plan's own settings cannot be tried.
    """
    with tempfile.TemporaryDirectory(prefix="surefoot-") as folder, silent_console() as console:
        config = check_config({**given, "output": f"{folder}/run"})
        run = prepare(config, Claim(Path(folder) / "run", "new"), console, NOTHING)
    answer = config.ppo.max_new_tokens if config.stage == "ppo" else 0
    lengths = length_facts(run.stage.data, answer, size=config.batch.size, micro=config.batch.micro)
    space = make_space(
        config, set(given_keys(given)), run.plan, hardware.detect(), measurements_from_json(run.plan.measurements)
    )
    said(f"{len(space.axes)} keys to vary, one after the other: {', '.join(axis.key for axis in space.axes)}")
    reference = _numbers(_reference(given))
    begun = time.monotonic()
    first = attempt(_with(given, space.start), steps=_FEWEST, rounds=_ROUNDS, limit=None)
    if first.trial is None:
        raise EnvironmentFault(Fault("tune", f"the plan's own settings cannot be tried: {first.failure}", "run doctor"))
    whole = time.monotonic() - begun
    a_step = sum(first.trial.seconds) / len(first.trial.seconds)
    limit = max(_LEAST_LIMIT, _PATIENCE * _ROUNDS * (seconds + a_step))
    compiling = min(limit, whole + _ROUNDS * seconds + _COMPILING)
    if any(axis.key == "compile" for axis in space.axes):
        said(f"a setting that compiles is given up after {compiling:.0f} s; compile: default in the config keeps it")
    trials = _Trials(
        given,
        run.plan,
        lengths,
        reference,
        steps=min(_MOST, max(_FEWEST, round(seconds / _ROUNDS / a_step))),
        limit=limit,
        compiling=compiling,
    )
    if trials.steps == _FEWEST:
        trials.known = (space.start, first)
    search = Search(space, trials.look, told)
    best = search.run()
    start = search.tried[0]
    if best is not start:
        start, best = trials.in_turns(start, best)
        best = best if best.rate > GAIN * start.rate else start
    if not best.passed:
        raise EnvironmentFault(Fault("tune", f"no setting passed; the plan's own: {best.failure}", "run doctor"))
    return Tuned(start, best, _with(given, best.settings), tuple(search.tried), _left_out(space, search), trials.steps)


def _left_out(space: Space, search: Search) -> tuple[tuple[str, str], ...]:
    """What the config, the machine or what was seen on the way made superfluous."""
    found = list(space.left_out)
    for axis in space.axes:
        if len({str(one.settings[axis.key]) for one in search.tried}) > 1:
            continue
        why = {
            "data.workers": "batches are waited for during less than 2 % of a step",
            "gradient_checkpointing": "everything fits without, and computing twice is never faster",
        }.get(axis.key, "nothing else passed the plan")
        found.append((axis.key, why))
    return tuple(found)


class _Trials:
    """Settings become trials of this config on this machine."""

    def __init__(
        self,
        given: Mapping[str, Any],
        plan: RunPlan,
        lengths: LengthFacts,
        reference: Numbers,
        *,
        steps: int,
        limit: float,
        compiling: float,
    ):
        """limit, compiling: seconds after which a trial is given up, compiling where it compiles."""
        self._given, self._plan, self._lengths, self._reference = given, plan, lengths, reference
        self.steps, self._limit, self._compiling = steps, limit, compiling
        self.known: tuple[Settings, Answer] | None = None  # one that need not be tried again

    def look(self, settings: Settings) -> Tried:
        plain = _with(self._given, settings)
        if refused := self._refused(plain):
            return Tried(settings, failure=refused)
        answer = self._attempt(settings, plain)
        if answer.trial is None:
            return Tried(settings, failure=answer.failure)
        return self._judged(settings, answer.trial)

    def _attempt(self, settings: Settings, plain: Mapping[str, Any]) -> Answer:
        if self.known is not None and self.known[0] == settings:
            (_, answer), self.known = self.known, None
            return answer
        compiles = settings.get("compile", self._plan.compile.value) != "off"
        limit = self._compiling if compiles else self._limit
        return attempt(plain, steps=self.steps, rounds=_ROUNDS, limit=limit)

    def in_turns(self, one: Tried, other: Tried, turns: int = 2) -> tuple[Tried, Tried]:
        """Both again, one after the other, so that a machine that slows down slows both; the best turn of each."""
        found: list[tuple[Tried, Tried]] = [(self.look(one.settings), self.look(other.settings)) for _ in range(turns)]
        first, second = (max((pair[side] for pair in found), key=lambda tried: tried.rate) for side in (0, 1))
        return first, second

    def _refused(self, plain: Mapping[str, Any]) -> str:
        """By the planner, or by its forecast of the memory."""
        try:
            plan = make_plan(check_config(plain), lengths=self._lengths, measurements=self._plan.measurements)
        except InputError as error:
            return str(error.faults[0])
        if fits(plan.memory):
            return ""
        return (
            f"not enough memory: {readable(plan.memory.total)} of {readable(usable(plan.memory.available))}, forecast"
        )

    def _judged(self, settings: Settings, trial: Trial) -> Tried:
        compute = str(settings.get("precision.compute", self._plan.precision.compute.value))
        wrong = failure(Numbers(trial.losses, trial.grad_norms), self._reference, compute)
        waiting = sum(trial.waiting) / sum(trial.seconds)
        return Tried(settings, trial.rate, trial.memory, waiting, wrong)


def _reference(given: Mapping[str, Any]) -> Trial:
    """The plain fp32 path's first steps."""
    answer: Answer = attempt(_with(given, PLAIN), steps=1, rounds=1, limit=None)
    if answer.trial is None:
        raise EnvironmentFault(Fault("tune", f"the plain fp32 path cannot be tried: {answer.failure}", "run doctor"))
    return answer.trial


def _numbers(trial: Trial) -> Numbers:
    return Numbers(trial.losses, trial.grad_norms)


def _with(given: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    config = deepcopy(dict(given))
    for key, value in settings.items():
        group = key.split(".")[0]
        if "." in key and not isinstance(config.get(group, {}), dict):  # a short form, such as precision: auto
            config.pop(group)
        put(config, key, value)
    return config
