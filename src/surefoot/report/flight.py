"""flight.jsonl: the last steps of a run, all of them, with the numbers of their examples, for whoever looks at a crash.

trainer_log.jsonl has a row for every log_every-th step; this file has every step, and only the last ones. A line costs
one append and no flush: it survives the end of the process, a power failure may take the newest. The file is cut to
KEPT lines each time it has twice as many, so its size is bounded.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from surefoot.report import journal
from surefoot.report.journal import Record
from surefoot.training.report import StepReport

FLIGHT = "flight.jsonl"
KEPT = 200  # lines after a cut
_MOST_EXAMPLES = 512  # of a step that are named


def flight_line(report: StepReport, seed: int) -> Record:
    """A step in plain values; what was not finite is null, and named. seed: of the run; with the step's number it
    gives every draw."""
    line: dict[str, Any] = {
        "step": report.step,
        "time": round(time.time(), 3),
        "decision": report.decision,
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "weight": report.weight,
        "tokens": report.tokens,
        "seconds": round(report.seconds, 6),
        "seed": seed,
        "examples": list(report.examples[:_MOST_EXAMPLES]),
    }
    more = len(report.examples) - _MOST_EXAMPLES
    optional = {
        "more_examples": max(0, more),
        "non_finite": report.non_finite,
        "scale": report.scale,
        "held": report.held,
    }
    return line | {name: value for name, value in optional.items() if value}


class FlightRing:
    """The last steps of one run. start: steps done; lines of later ones, which are done again, go."""

    def __init__(self, run: Path, seed: int, start: int = 0):
        self._path, self._seed, self._start, self._lines = run / FLIGHT, seed, start, 0

    def begin(self) -> None:
        """Called once the run folder is this run's own."""
        kept = [line for line in recent(self._path.parent) if _step(line) <= self._start][-KEPT:]
        if self._path.exists():
            journal.rewrite(self._path, kept)
        self._lines = len(kept)

    def add(self, report: StepReport) -> None:
        """One line more."""
        journal.append(self._path, flight_line(report, self._seed))
        self._lines += 1
        if self._lines >= 2 * KEPT:
            kept = recent(self._path.parent)[-KEPT:]
            journal.rewrite(self._path, kept)
            self._lines = len(kept)


def recent(run: Path) -> list[Record]:
    """Lines of the last steps, oldest first; damaged ones are left out."""
    return journal.salvage(run / FLIGHT)[0]


def _step(line: Record) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0
