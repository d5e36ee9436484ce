"""The state of a run in one word and one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.report.events import last_of_the_process
from surefoot.report.journal import Record
from surefoot.report.trainer_log import Row
from surefoot.report.wording import duration_text, times
from surefoot.system.messages import counted, was

Status = Literal["running", "finished", "stopped", "diverged", "failed"]
WORDS: dict[Status, str] = {
    "running": "Running",
    "finished": "Finished",
    "stopped": "Stopped",
    "diverged": "Diverged",
    "failed": "Failed",
}


@dataclass(frozen=True)
class Verdict:
    status: Status
    sentence: str

    @property
    def word(self) -> str:
        return WORDS[self.status]


def status_of(events: Sequence[Record], *, locked: bool, published: bool) -> Status:
    """The state of a run, judged from outside.

    locked: a process is using the folder.
    published: the folder's manifest, which is written last, exists.

    A killed run leaves neither a lock nor a final event: it counts as stopped.
    """
    if locked:  # checked first: a finished run that is being extended still has its old manifest
        return "running"
    if published:
        return "finished"
    last = last_of_the_process(events)
    return last if last in ("diverged", "failed") else "stopped"


def reported_status(events: Sequence[Record], *, published: bool) -> Status:
    """The state that the run itself recorded, for the report that it writes at its end while it holds the lock."""
    last = last_of_the_process(events)
    return "finished" if last == "published" else status_of(events, locked=False, published=published)


def verdict(status: Status, rows: Sequence[Row], events: Sequence[Record]) -> Verdict:
    done, total = progress(rows)
    place = f"step {done:,} of {total:,}" if total else "before its first logged step"
    if status == "running":
        return Verdict(status, f"{place[0].upper()}{place[1:]}. {_soundness(rows)}")
    if status == "finished":
        early = f" of {total:,}, when evaluation no longer improved" if done < total else ""
        sentence = f"{_soundness(rows)}{_ways_back(events)}{_changes(events)} {_last_text(events, 'published')}".strip()
        return Verdict(status, f"{counted(done, 'step')}{early}. {sentence}".strip())
    if status == "stopped":
        return Verdict(status, f"Ended at {place}; it continues from its last checkpoint. {_soundness(rows)}")
    return Verdict(status, _last_text(events, status))


def progress(rows: Sequence[Row]) -> tuple[int, int]:
    """Logged steps done, and steps in total."""
    if not rows:
        return 0, 0
    total = rows[-1].get("total_steps")
    return rows[-1]["current_steps"], total if isinstance(total, int) else 0


def duration(rows: Sequence[Row]) -> str:
    """Wall-clock time of all sessions so far, in words; empty if no row has it."""
    text = next((row["elapsed_time"] for row in reversed(rows) if isinstance(row.get("elapsed_time"), str)), "")
    parts = text.split(":")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        return ""
    hours, minutes, seconds = map(int, parts)
    whole = 3600 * hours + 60 * minutes + seconds
    return duration_text(whole) if whole else "under 1 s"


def _soundness(rows: Sequence[Row]) -> str:
    skipped = sum(row.get("skipped") == "non_finite" for row in rows)
    if skipped:
        return f"{counted(skipped, 'step')} {was(skipped)} skipped: the loss or a gradient was not finite."
    return "Every logged loss and gradient is finite." if rows else ""


def _ways_back(events: Sequence[Record]) -> str:
    count = sum(event.get("kind") == "rollback" for event in events)
    return f" Went back to a checkpoint {times(count)}." if count else ""


def _changes(events: Sequence[Record]) -> str:
    count = sum(event.get("kind") == "changed" for event in events)
    return f" Its config changed {times(count)} when it was resumed: see the events." if count else ""


def _last_text(events: Sequence[Record], kind: str) -> str:
    text: Any = next((event.get("text") for event in reversed(events) if event.get("kind") == kind), "")
    return f"{text[0].upper()}{text[1:].rstrip('.')}." if isinstance(text, str) and text else ""
