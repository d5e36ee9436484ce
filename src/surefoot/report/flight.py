"""flight.jsonl: every one of the last steps with the numbers of its examples, to investigate a crash.

trainer_log.jsonl has a row for every log_every-th step of the run; this file has every step, but only the last ones. A
step has two lines: one before it is computed, so that the step in which a process dies is known, and one with its
result. A line costs one append and no flush: it survives the end of the process, but a power failure may lose the
newest. At twice KEPT completed steps the file is cut to KEPT, so its size is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.report import journal
from surefoot.report.journal import Record
from surefoot.training.report import StepReport

if TYPE_CHECKING:  # reading a log must not import torch
    from surefoot.data.batching.batch import RecordName

FLIGHT = "flight.jsonl"
KEPT = 200  # steps kept by a cut
_BEGINS = "begins"  # key of a step's number in the line written before it
_MOST_EXAMPLES = 512  # listed per step


def flight_line(report: StepReport, seed: int) -> Record:
    """A completed step as JSON values; non-finite values are null and named.

    seed: the run's seed; with the step's number it determines all random draws.
    """
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
        **_named(report.examples),
    }
    optional = {
        "non_finite": report.non_finite,
        "scale": report.scale,
        "held": report.held,
    }
    return line | {name: value for name, value in optional.items() if value}


def begin_line(step: int, micro_batches: Sequence[Sequence[RecordName]], seed: int) -> Record:
    """A step that is about to be computed.

    micro_batches: the examples of each. Seed, step and micro-batch number determine all random draws.
    """
    return {
        _BEGINS: step,
        "time": round(time.time(), 3),
        "seed": seed,
        "sizes": [len(one) for one in micro_batches],
        **_named([name for one in micro_batches for name in one]),
    }


def _named(examples: Sequence[RecordName]) -> Record:
    more = len(examples) - _MOST_EXAMPLES
    return {"examples": list(examples[:_MOST_EXAMPLES]), **({"more_examples": more} if more > 0 else {})}


class FlightRing:
    """Writes the last steps of a run. start: steps already done; lines of later steps, which are repeated, are
    dropped."""

    def __init__(self, run: Path, seed: int, start: int = 0):
        self._path, self._seed, self._start, self._lines = run / FLIGHT, seed, start, 0

    def begin(self) -> None:
        """Called once the run folder is locked."""
        kept = [line for line in recent(self._path.parent) if _step(line) <= self._start][-KEPT:]
        if self._path.exists():
            journal.rewrite(self._path, kept)
        self._lines = len(kept)

    def begins(self, step: int, micro_batches: Sequence[Sequence[RecordName]]) -> None:
        """Called before the step is computed."""
        # No flush: the kernel keeps the line if this process is killed, and a flush costs more than a small step.
        journal.append(self._path, begin_line(step, micro_batches, self._seed))

    def add(self, report: StepReport) -> None:
        """Record a completed step."""
        journal.append(self._path, flight_line(report, self._seed))
        self._lines += 1
        if self._lines >= 2 * KEPT:
            kept = recent(self._path.parent)[-KEPT:]
            journal.rewrite(self._path, kept)
            self._lines = len(kept)


def recent(run: Path) -> list[Record]:
    """Lines of the last completed steps, oldest first, without damaged ones."""
    return [line for line in journal.salvage(run / FLIGHT)[0] if _BEGINS not in line]


def step_done(line: bytes) -> int | None:
    """The number of the completed step that a line records; None for any other line."""
    record = journal.parse(line.decode(errors="replace"))
    step = None if record is None or _BEGINS in record else record.get("step")
    return step if isinstance(step, int) else None


def unfinished(run: Path) -> Record | None:
    """The line of the step that was being computed last, None if it was completed."""
    lines = journal.salvage(run / FLIGHT)[0]
    return lines[-1] if lines and isinstance(lines[-1].get(_BEGINS), int) else None


def _step(line: Record) -> int:
    step = line.get("step")
    return step if isinstance(step, int) else 0
