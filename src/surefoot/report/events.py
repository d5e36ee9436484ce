"""events.jsonl, samples.jsonl, answers.jsonl and profile.jsonl of a run folder, for people to read: events, generated
samples, scored rollout answers, and where the time of a step went.

An event is {"kind", "step", "time", "text"}, a sample {"step", "prompt", "answer"}, an answer holds its scores, a
profile a step and the fields of `StepProfile`. On resume all are cut like the training log, since the steps after the
checkpoint are repeated. Events about the process rather than a step (started, stopped, diverged) are kept. Samples and
answers are texts of a model, which can be gigabytes: they are never read or copied whole (`surefoot.report.log_marks`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from surefoot.report import journal
from surefoot.report.journal import Record
from surefoot.system.redaction import veiled
from surefoot.training.report import StepProfile

EVENTS, SAMPLES, ANSWERS, PROFILE = "events.jsonl", "samples.jsonl", "answers.jsonl", "profile.jsonl"
TEXTS = (SAMPLES, ANSWERS)

Kind = Literal[
    "start",
    "resume",
    "changed",
    "best",
    "saved",
    "skipped",
    "non_finite",
    "spike",
    "caution",
    "stopped",
    "diverged",
    "rollback",
    "failed",
    "published",
    "tracker",
]
# Tuples, not sets: a damaged line may have an unhashable list as its kind.
OF_THE_PROCESS = ("start", "resume", "stopped", "diverged", "failed")
# Reasons why steps before the event are repeated, or others follow it.
_KEPT = (*OF_THE_PROCESS, "rollback", "changed")


def append_event(run: Path, kind: Kind, step: int, text: str) -> None:
    """Add a line to events.jsonl.

    step: optimizer steps done so far.
    text: one sentence; secrets in it, which an error may quote, are removed.
    """
    stamp = datetime.now(UTC).isoformat(timespec="milliseconds")
    journal.append(run / EVENTS, {"kind": kind, "step": step, "time": stamp, "text": veiled(text)})


def mend_events(run: Path) -> None:
    """Drop lines broken by a power failure, so that the next event starts on its own line."""
    journal.rewrite(run / EVENTS, journal.salvage(run / EVENTS)[0])


def note_once(run: Path, kind: Kind, step: int, text: str) -> None:
    """Call `append_event` unless the same event is already there."""
    known = ((event.get("kind"), event.get("text")) for event in journal.salvage(run / EVENTS)[0])
    if (kind, veiled(text)) not in known:
        append_event(run, kind, step, text)


def append_samples(run: Path, step: int, answers: Sequence[tuple[str, str]]) -> None:
    """answers: (prompt, answer) pairs."""
    for prompt, answer in answers:
        journal.append(run / SAMPLES, {"step": step, "prompt": prompt, "answer": answer})


def append_answers(run: Path, answers: Sequence[Mapping[str, Any]]) -> None:
    """answers: each with the step before which it was generated. No field depends on the clock, so that a resumed run
    writes the same bytes."""
    for one in answers:
        journal.append(run / ANSWERS, one)


def append_profile(run: Path, step: int, profile: StepProfile) -> None:
    journal.append(run / PROFILE, {"step": step, **asdict(profile)})


def cut_events(run: Path, step: int, *, evaluated: bool) -> None:
    """Keep what lies before a checkpoint of `step`.

    evaluated: whether the checkpoint was written after that step's evaluation; if not, the evaluation is repeated.
        Damaged lines are dropped: nothing is computed from these files.
    """
    for name, stays in STAYS.items():
        if name in TEXTS:
            journal.cut_end(run / name, lambda record, stays=stays: stays(record, step, evaluated))
        elif (run / name).exists():
            records = journal.salvage(run / name)[0]
            journal.rewrite(run / name, [record for record in records if stays(record, step, evaluated)])


def _event_stays(event: Record, step: int, evaluated: bool) -> bool:
    return event.get("kind") in _KEPT or _is_before(event, step, evaluated or event.get("kind") != "best")


def _is_before(record: Record, step: int, inclusive: bool) -> bool:
    at = record.get("step")
    return isinstance(at, int) and (at < step or (at == step and inclusive))


# Whether `cut_events` keeps a record. Samples belong to an evaluation.
STAYS: dict[str, Callable[[Record, int, bool], bool]] = {
    EVENTS: _event_stays,
    SAMPLES: _is_before,
    ANSWERS: lambda record, step, evaluated: _is_before(record, step, inclusive=True),
    PROFILE: lambda record, step, evaluated: _is_before(record, step, inclusive=True),
}


def last_of_the_process(events: Sequence[Record]) -> Any:
    """The kind of the newest event about the process's state ("start", "stopped", …); None if there is none."""
    ends = (*OF_THE_PROCESS, "published")
    return next((event["kind"] for event in reversed(events) if event.get("kind") in ends), None)
