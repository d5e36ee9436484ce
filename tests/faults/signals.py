"""Runs that are killed, or asked to stop, at a random moment, and go on: the end is the undisturbed run's."""

import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from faults.stages import SAVED, STEPS, Runs
from faults.trials import Trial
from helpers import run_position
from surefoot.report.verification import compare_folders
from surefoot.training.checkpoint import list_checkpoints, newest_verified
from surefoot.training.manifest import MANIFEST

KILLED, STOPPED = -9, 75
GRACE = 30.0  # seconds that a run has to save what it has, as preempting machines give it
_LATER = {"save": 0.005, "update": 0.02, "write": 0.02}  # seconds, at most, that a signal comes after its place
_MOST = {"save": 45, "update": 2 * STEPS, "write": 250}  # of the smallest whole run: flushes and renames of its three
# saves; micro-batches; writes from the first of the command to the publication


def random_kill(draw: Random) -> dict[str, Any]:
    """Of two kills about one in a save, of the others most while it computes, some anywhere."""
    place = draw.choices(["save", "update", "write"], [6, 3, 1])[0]
    delay = draw.choice([0.0, draw.uniform(1e-4, _LATER[place])])
    return {"at": place, "n": draw.randint(1, _MOST[place]), "delay": delay}


class _Signalling:
    """combinations: taken in turn by the seeds, so that each has its share."""

    def __init__(self, runs: Runs, combinations: Sequence[tuple[str, str, str]]):
        self.runs, self.combinations = runs, combinations

    def _begin(self, trial: Trial) -> tuple[tuple[str, str, str], str, Path]:
        combination = self.combinations[trial.seed % len(self.combinations)]
        return combination, self.runs.config(combination, trial.folder), trial.folder.with_suffix(".txt")


class Killing(_Signalling):
    """most: kills of one run. kills: how many there were, by the part of the run in which they fell; a run that was
    over before its kill counts none."""

    def __init__(self, runs: Runs, combinations: Sequence[tuple[str, str, str]], most: int):
        super().__init__(runs, combinations)
        self.most = most
        self.kills: Counter[str] = Counter()

    def __call__(self, trial: Trial) -> str:
        combination, config, log = self._begin(trial)
        straight, where = self.runs.straight(combination), log.with_suffix(".where")
        plan = [random_kill(trial.draw) for _ in range(trial.draw.randint(1, self.most))]
        for kill in plan:
            code = self.runs.server.run(["train", config, "--resume"], log, kill, where=where)
            if code == 0:
                break
            if code != KILLED:
                return f"{plan}: exit {code}: {log.read_text()[-2000:]}"
            kill["fell"] = run_position.read(where).killed_in
            self.kills[kill["fell"]] += 1
            if any(not (one.folder / MANIFEST).is_file() for one in list_checkpoints(trial.folder)):
                return f"{plan}: a checkpoint was visible before it was finished"
        code = self.runs.server.run(["train", config, "--resume"], log)
        if code:
            return f"{plan}: exit {code}: {log.read_text()[-2000:]}"
        differences = compare_folders(straight, trial.folder)
        return f"{plan}: {differences[:3]}" if differences else ""


def is_over(found: run_position.Whereabouts) -> bool:
    """Whether there was no step left to take when the signal came: in the evaluation after the last one, which comes
    before the last save, or later."""
    evaluates = found.asked_in == run_position.EVALUATION and found.saves == SAVED - 1
    saves = found.asked_in in (run_position.SAVE, run_position.BETWEEN) and found.saves == SAVED
    return found.asked_at is None or evaluates or saves or found.asked_in == run_position.AFTER


class Stopping(_Signalling):
    """A run that has taken all its steps goes on to its end, and exits with 0; so does one that had ended before its
    signal. One that had no steps yet has nothing to save."""

    def __call__(self, trial: Trial) -> str:
        combination, config, log = self._begin(trial)
        straight, where = self.runs.straight(combination), log.with_suffix(".where")
        place = trial.draw.choice(["update", "save", "write"])
        delay = trial.draw.uniform(1e-4, _LATER[place])
        kill = {"at": place, "n": trial.draw.randint(1, _MOST[place]), "delay": delay, "number": signal.SIGTERM}
        code = self.runs.server.run(["train", config], log, kill, where=where)
        ended, found = time.monotonic(), run_position.read(where)
        drawn = {**kill, "fell": found.asked_in}
        waited = 0.0 if found.asked_at is None else ended - found.asked_at
        if code != STOPPED and not (is_over(found) and code == 0):
            return f"{drawn}: exit {code}: {log.read_text()[-2000:]}"
        if waited > GRACE:
            return f"{drawn}: {waited:.3f} s from the signal to the end"
        checkpoint, rejected = newest_verified(trial.folder)
        if (checkpoint is None and found.asked_in != run_position.BEFORE) or rejected:
            return f"{drawn}: {checkpoint}, {rejected}"
        if code == STOPPED and self.runs.server.run(["train", config, "--resume"], log) != 0:
            return f"{drawn}: resumed, it failed: {log.read_text()[-2000:]}"
        differences = compare_folders(straight, trial.folder)
        return f"{drawn}: {differences[:3]}" if differences else ""
