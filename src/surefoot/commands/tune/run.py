"""`surefoot tune`: plan, search, decide, and return the resulting config."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.commands.tune.attempt import Answer, Journal, Request, can_fork, workshop
from surefoot.commands.tune.search import Search, Space, Tried, better, given_keys, make_space
from surefoot.commands.tune.trials import ROUNDS, Attempt, Numbers, Terms, Trials, choose_reference, refusal
from surefoot.config.load import check_config
from surefoot.config.overrides import with_settings
from surefoot.planning.measurements import measurements_from_json
from surefoot.report.observer import silent_console
from surefoot.runs.custom import with_named
from surefoot.runs.plan_with_data import lengths_of
from surefoot.runs.prepare import prepare
from surefoot.runs.prepared import PreparedRun
from surefoot.runs.run_folder import FolderState
from surefoot.runs.trial import Clock, Trial
from surefoot.system import hardware
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.messages import counted

_FEWEST, _MOST = 2, 12  # timed steps of a trial
_PATIENCE = 4.0  # times the expected duration of a trial like the first; slower ones cannot be the fastest
_LEAST_LIMIT = 60.0  # seconds
_COMPILING = 30.0  # seconds that compiling may add to a trial
_BUSY = 0.1  # share of processor time taken by others above which measurements are doubtful


@dataclass(frozen=True)
class Tuned:
    """The result of a tuning.

    start, best: as measured last.
    turns: the plan's own and the fastest setting, timed alternately, which decides; empty if nothing seemed faster or
        the search was interrupted before.
    config: plain values, the given and the found ones.
    tried: all trials in order, as measured first.
    left_out: (key, why it was not varied).
    steps: timed steps of a trial.
    finished: False if Ctrl-C ended the search.
    """

    start: Tried
    best: Tried
    config: dict[str, Any]
    tried: tuple[Tried, ...]
    turns: tuple[Tried, ...]
    left_out: tuple[tuple[str, str], ...]
    steps: int
    finished: bool = True

    @property
    def gain(self) -> float:
        return self.best.rate / self.start.rate if self.start.rate else 1.0

    @property
    def held_up(self) -> float:
        """Share of a trial's time in which other programs used the processor; 0 if it was small."""
        share = statistics.median(one.held_up for one in self.tried)
        return share if share > _BUSY else 0.0


def search_settings(
    given: Mapping[str, Any],
    *,
    seconds: float,
    on_trial: Callable[[Tried], None],
    say: Callable[[str], None],
    kept: Path | None = None,
    clock: Clock = "wall",
) -> Tuned:
    """Search for the fastest values of the settings that the config leaves open.

    given: the config as plain values, short forms expanded.
    seconds: approximate length of a trial's timed steps.
    on_trial: called with every setting after its trial.
    say: called with progress messages.
    kept: file of the measurements so far, from which an interrupted search continues; removed at the end.
    clock: see `run_trial`.

    Raises what a run of the config would, and EnvironmentFault if the plan's own settings cannot be tried.
    """
    with tempfile.TemporaryDirectory(prefix="surefoot-") as folder, silent_console() as console:
        config = check_config({**given, "output": f"{folder}/run"})
        run = prepare(config, FolderState(Path(folder) / "run", "new"), console, with_named(config))
    space = make_space(
        config, set(given_keys(given)), run.plan, hardware.detect(), measurements_from_json(run.plan.measurements)
    )
    say(f"{counted(len(space.axes), 'key')} to vary, one at a time: {', '.join(axis.key for axis in space.axes)}")
    journal = Journal(kept, _about(given, seconds, clock, run, space))
    if journal.known:
        say(f"continuing after {counted(journal.known, 'trial')} stored in {kept}; delete it to measure them again")
    with workshop(forks=can_fork(run.plan.device.value)) as shop:

        def attempt(request: Request, limit: float | None) -> Answer:
            return journal.answer(request, lambda: shop.attempt(request, limit=limit))

        trials, steps = _first_trials(given, seconds, clock, run, space, attempt, say)
        search, turns = Search(space, trials.look, on_trial), ()
        try:
            best = search.run()
            start, finished = search.tried[0], True
            if best is not start:
                say("final comparison: the plan's own choices and the fastest setting, alternately")
                turns = start, best = trials.in_turns(start, best)
                best = better(start, best)
        except KeyboardInterrupt:
            if not search.tried:
                raise
            start, best, finished = search.tried[0], search.best, False
    if not best.passed:
        raise EnvironmentFault(
            Fault("tune", f"no setting passed; the plan's own: {best.failure}", "run doctor", code="SF-TUNE")
        )
    if finished:
        journal.finish()
    tuned = with_settings(given, best.settings)
    return Tuned(start, best, tuned, tuple(search.tried), turns, _left_out(space, search), steps, finished)


def _about(given: Mapping[str, Any], seconds: float, clock: Clock, run: PreparedRun, space: Space) -> dict[str, Any]:
    """Everything that results depend on: hashes of model, data and versions; the first path is a new temporary
    folder."""
    identity = {key: value for key, value in run.identity.items() if key != "config"}
    axes = [[axis.key, *axis.values] for axis in space.axes]
    return {
        "given": given,
        "seconds": [seconds, clock],
        "identity": identity,
        "machine": hardware.describe(),
        "space": [axes, space.start],
    }


def _first_trials(
    given: Mapping[str, Any],
    seconds: float,
    clock: Clock,
    run: PreparedRun,
    space: Space,
    attempt: Attempt,
    say: Callable[[str], None],
) -> tuple[Trials, int]:
    """Measure the plain path's results and the time of the plan's own settings. Returns the trials, with the limits
    that follow from these, and the number of timed steps."""
    lengths = lengths_of(run.config, run.task.data)
    plain = choose_reference(given, run.plan, lambda config: refusal(config, run.plan, lengths))
    if plain.compute != "fp32":
        say(f"settings are compared with the plain path in {plain.compute}, because it does not fit the memory in fp32")
    reference = _of(attempt(Request(plain.config, 0, 1, clock=clock), None), f"the plain {plain.compute} path")
    answer = attempt(Request(with_settings(given, space.start), _FEWEST, ROUNDS, clock=clock), None)
    first = _of(answer, "the plan's own settings")
    a_step = sum(first.seconds) / len(first.seconds)
    steps = min(_MOST, max(_FEWEST, round(seconds / ROUNDS / a_step)))
    usual = answer.whole + ROUNDS * steps * a_step
    limit = max(_LEAST_LIMIT, _PATIENCE * usual)
    compiling = min(limit, usual + _COMPILING)
    if any(axis.key == "compile" for axis in space.axes):
        say(
            f"a setting that compiles is stopped after {compiling:.0f} s; set compile: default in the config to keep it"
        )
    numbers = Numbers(reference.losses, reference.grad_norms, plain.compute)
    trials = Trials(given, run.plan, lengths, numbers, Terms(steps, limit, compiling, clock), attempt)
    if steps == _FEWEST:
        trials.known = (space.start, answer)
    return trials, steps


def _of(answer: Answer, whose: str) -> Trial:
    if answer.trial is None:
        raise EnvironmentFault(
            Fault("tune", f"{whose} cannot be tried: {answer.failure}", "run doctor", code="SF-TUNE")
        )
    return answer.trial


def _left_out(space: Space, search: Search) -> tuple[tuple[str, str], ...]:
    """Keys that were not varied because of the config, the machine or measurements, with the reasons."""
    found = list(space.left_out)
    for axis in space.axes:
        if len({str(one.settings[axis.key]) for one in search.tried}) > 1:
            continue
        why = {
            "data.workers": "less than 2 % of a step is spent waiting for batches",
            "gradient_checkpointing": "everything fits without it, and recomputation is never faster",
        }.get(axis.key, "the plan refused all other values")
        found.append((axis.key, why))
    return tuple(found)
