"""Record which part of its run a process is in, so that it is known after a kill.

    journal = Journal(path).installed()       # in the process, before the command
    found = read(path)                        # in another one, later: found.killed_in, found.asked_in, found.asked_at

Each part that begins is written as one line in one write, which survives a kill.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

BEFORE, DATA, STEP, EVALUATION, SAVE = "before the steps", "data", "step", "evaluation", "save"
BETWEEN, PUBLICATION, AFTER = "between these", "publication", "after the steps"
PARTS = (BEFORE, DATA, STEP, EVALUATION, SAVE, BETWEEN, PUBLICATION, AFTER)
_SIGNAL = "signal"


class Journal:
    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self.part = ""
        self._begin(BEFORE)

    def _begin(self, part: str) -> None:
        self.part = part
        os.write(self._file, f"{part}\n".encode())

    def signal(self) -> None:
        """Record that a signal is being sent now."""
        os.write(self._file, f"{_SIGNAL} {time.monotonic()}\n".encode())

    @contextmanager
    def during(self, part: str, afterwards: str = "") -> Iterator[None]:
        """Record a part while the block runs. afterwards: the part that follows; by default the one before."""
        before = self.part
        self._begin(part)
        try:
            yield
        finally:
            self._begin(afterwards or before)

    def installed(self) -> Journal:
        """Record the parts for the rest of this process."""
        from surefoot.runs import run, steps
        from surefoot.training import loop

        train = loop.run_loop

        def told_train(job: Any, *arguments: Any) -> Any:
            evaluate = self._told(EVALUATION, job.evaluate) if job.evaluate else None
            told = replace(job, batches=self._told(DATA, job.batches), evaluate=evaluate)
            with self.during(BETWEEN, AFTER):
                return train(told, *arguments)

        steps.run_loop = told_train
        loop.train_step = self._told(STEP, loop.train_step)
        loop._save = self._told(SAVE, loop._save)
        run.publish = self._told(PUBLICATION, run.publish)
        return self

    def _told(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self.during(part):
                return function(*arguments, **keywords)

        return call


@dataclass(frozen=True)
class Whereabouts:
    """Where a process was.

    killed_in: the last part that began.
    asked_in, asked_at: the part when a signal was sent, and the system's monotonic clock then; "" and None without one.
    saves: number of saves that had begun by then.
    """

    killed_in: str
    asked_in: str
    asked_at: float | None
    saves: int


def read(path: Path) -> Whereabouts:
    killed_in, asked_in, asked_at, saves = "", "", None, 0
    for line in path.read_text().splitlines():
        word, _, number = line.partition(" ")
        if word == _SIGNAL:
            asked_in, asked_at = killed_in, float(number)
        else:
            killed_in = line
            saves += line == SAVE and asked_at is None
    return Whereabouts(killed_in, asked_in, asked_at, saves)
