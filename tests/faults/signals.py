"""Runs that are killed, or asked to stop, at a random moment, and go on: the end is the undisturbed run's."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults.stages import STEPS, Runs
from surefoot.report.verification import compare_folders
from surefoot.training.checkpoint import list_checkpoints, newest_verified
from surefoot.training.manifest import MANIFEST

KILLED, STOPPED = -9, 75
GRACE = 30.0  # seconds that a run has to save what it has, as preempting machines give it
_LATER = 0.02  # seconds, at most, between a place in the run and the signal: some parts of a step or of a save
_UPDATES, _SAVES, _WRITES = 2 * STEPS, 60, 40  # micro-batches of a whole run; flushes and renames of two saves; writes


def random_kill(draw: random.Random) -> dict[str, Any]:
    """Of two kills one in a save, of the others most while it computes, some before the first step."""
    place = draw.choices(["save", "update", "write"], [5, 4, 1])[0]
    most = {"save": _SAVES, "update": _UPDATES, "write": _WRITES}[place]
    return {"at": place, "n": draw.randint(1, most), "delay": draw.choice([0.0, draw.uniform(1e-4, _LATER)])}


class Killing:
    """kills: how many there were, by place; a run that was over before its kill counts none."""

    def __init__(self, runs: Runs, combinations: Sequence[tuple[str, str, str]], most: int):
        self.runs, self.combinations, self.most = runs, combinations, most
        self.kills: Counter[str] = Counter()

    def __call__(self, draw: random.Random, output: Path) -> str:
        combination = draw.choice(self.combinations)
        straight = self.runs.straight(combination)
        config, log = self.runs.config(combination, output), output.with_suffix(".txt")
        plan = [random_kill(draw) for _ in range(draw.randint(1, self.most))]
        for kill in plan:
            code = self.runs.server.run(["train", config, "--resume"], log, kill)
            if code == 0:
                break
            if code != KILLED:
                return f"{combination}, {plan}: exit {code}: {log.read_text()[-2000:]}"
            self.kills[kill["at"]] += 1
            if any(not (one.folder / MANIFEST).is_file() for one in list_checkpoints(output)):
                return f"{combination}, {plan}: a checkpoint was visible before it was finished"
        code = self.runs.server.run(["train", config, "--resume"], log)
        if code:
            return f"{combination}, {plan}: exit {code}: {log.read_text()[-2000:]}"
        differences = compare_folders(straight, output)
        return f"{combination}, {plan}: {differences[:3]}" if differences else ""


class Stopping:
    """codes: how the runs ended that were asked to stop; 0 where the signal came after the last step."""

    def __init__(self, runs: Runs, combinations: Sequence[tuple[str, str, str]]):
        self.runs, self.combinations = runs, combinations
        self.codes: Counter[int] = Counter()
        self.slowest = 0.0  # seconds of a whole command, which is more than the stop takes

    def __call__(self, draw: random.Random, output: Path) -> str:
        combination = draw.choice(self.combinations)
        config, log = self.runs.config(combination, output), output.with_suffix(".txt")
        place, most = draw.choice([("update", _UPDATES), ("save", _SAVES)])
        kill = {"at": place, "n": draw.randint(1, most), "delay": draw.uniform(1e-4, _LATER), "number": signal.SIGTERM}
        started = time.monotonic()
        code = self.runs.server.run(["train", config], log, kill)
        took = time.monotonic() - started
        self.slowest = max(self.slowest, took)
        self.codes[code] += 1
        what = f"{combination}, {kill}"
        if code not in (STOPPED, 0) or took > GRACE:
            return f"{what}: exit {code} after {took:.0f} s: {log.read_text()[-2000:]}"
        found, rejected = newest_verified(output)
        if found is None or rejected:
            return f"{what}: {found}, {rejected}"
        if code == STOPPED and self.runs.server.run(["train", config, "--resume"], log) != 0:
            return f"{what}: resumed, it failed: {log.read_text()[-2000:]}"
        differences = compare_folders(self.runs.straight(combination), output)
        return f"{what}: {differences[:3]}" if differences else ""
