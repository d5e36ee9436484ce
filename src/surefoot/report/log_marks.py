"""How far a run's texts reached at each checkpoint: `logs.json`, size and SHA-256 of samples.jsonl and answers.jsonl.

    marks = LogMarks(run)                        # once per process
    marks.write(staging, step, evaluated)        # into each checkpoint, under its manifest
    check_marks(run, checkpoint)                 # `surefoot verify`
    require_marks(run, checkpoint)               # a resumed run, before anything else
    cut_to_marks(run, checkpoint)                # a resumed run, before it writes its own lines

What a model writes can be gigabytes. A copy in each checkpoint, as of the other logs (`surefoot.report.log_copies`),
would grow with the run; a mark does not, and new lines are read and hashed once. The trade-off: a change is not named
by its line, and cannot be undone. Nothing is computed from these files, so a run that has lost one can go on, once the
user has put an empty file in its place.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from surefoot.report import journal
from surefoot.report.events import STAYS, TEXTS
from surefoot.report.record import is_plain
from surefoot.system import durable, plain_files
from surefoot.system.errors import IntegrityError
from surefoot.training.manifest import FileCheck, damaged, unreadable

NAME = "logs.json"
_CHUNK = 1 << 20  # bytes per read when hashing


class LogMarks:
    """The marks of one run, written by one process."""

    def __init__(self, run: Path):
        self._texts = {name: _Text(run / name) for name in TEXTS}

    def write(self, folder: Path, step: int, *, evaluated: bool) -> None:
        """Write the marks into a checkpoint folder that is about to be flushed.

        step: the checkpoint's step.
        evaluated: whether it is written after that step's evaluation.
        """
        for name, text in self._texts.items():
            text.grow(lambda record, stays=STAYS[name]: stays(record, step, evaluated))
        if marks := {name: text.mark for name, text in self._texts.items() if text.mark["size"]}:
            durable.fill_json(folder / NAME, marks)


class _Text:
    """A growing file, hashed as far as it was read."""

    def __init__(self, path: Path):
        self._path, self._size, self._digest = path, 0, hashlib.sha256()

    def grow(self, stays: Callable[[journal.Record], bool]) -> None:
        """Hash the new lines, except those at the end that a resume would cut. If the file became shorter, somebody
        else changed it; what it is now is hashed."""
        with suppress(OSError):  # an unreadable log must not stop the run
            end = journal.end_of(self._path, stays)
            if end < self._size:
                self._size, self._digest = 0, hashlib.sha256()
            with self._path.open("rb") as file:
                file.seek(self._size)
                while new := file.read(min(_CHUNK, end - self._size)):
                    self._digest.update(new)
                    self._size += len(new)

    @property
    def mark(self) -> dict[str, Any]:
        return {"size": self._size, "sha256": self._digest.hexdigest()}


def check_marks(run: Path, checkpoint: Path) -> list[FileCheck]:
    """Compare a run's texts with the marks in one of its verified checkpoints, ignoring what follows them; [] if it has
    no marks."""
    checks = []
    for name, mark in _read(checkpoint).items():
        path, size, fault = run / name, mark["size"], None
        fix = f"put it back as it was, or leave an empty file in its place (: > {path}) to go on without it"
        there = path.stat().st_size if is_plain(path) else None
        if there is None:
            fault = damaged(path, f"is missing, and had {size:,} bytes when {checkpoint.name} was written", fix)
        elif there < size:
            what = f"has {there:,} bytes, and had {size:,} when {checkpoint.name} was written"
            fault = damaged(path, what, fix)
        else:
            try:
                if durable.sha256_file(path, size) != mark["sha256"]:
                    what = f"its first {size:,} bytes are not as they were when {checkpoint.name} was written"
                    fault = damaged(path, what, fix)
            except OSError as error:
                fault = unreadable(path, error, fix)
        checks.append(FileCheck(name, size, mark["sha256"], fault))
    return checks


def require_marks(run: Path, checkpoint: Path) -> None:
    """Raise IntegrityError if a text is not as it was; one that was emptied is left out on purpose."""
    if faults := [one.fault for one in check_marks(run, checkpoint) if one.fault and not _is_emptied(run / one.name)]:
        raise IntegrityError(faults)


def cut_to_marks(run: Path, checkpoint: Path) -> list[str]:
    """Cut the texts to what they were, and return which were emptied. Call `require_marks` first; the run must be
    locked."""
    emptied = []
    for name, mark in _read(checkpoint).items():
        path = run / name
        if _is_emptied(path):
            emptied.append(f"{path} is empty: what {checkpoint.name} had of it is left out")
        elif path.stat().st_size > mark["size"]:
            durable.shorten(path, mark["size"])
    return emptied


def _read(checkpoint: Path) -> Mapping[str, Mapping[str, Any]]:
    """name -> {"size": bytes, "sha256": hash}; {} for a checkpoint without marks."""
    path = checkpoint / NAME
    return json.loads(plain_files.read_text(path)) if path.is_file() else {}


def _is_emptied(path: Path) -> bool:
    return is_plain(path) and path.stat().st_size == 0
