"""Copies of a run's logs in each checkpoint: `logs.tar`, with one gzip file per log.

    copies = LogCopies(run)                      # once per process
    copies.write(staging, step, evaluated)       # into each checkpoint, under its manifest
    check_logs(run, checkpoint)                  # `surefoot verify`: which row was changed
    mend_logs(run, checkpoint)                   # a resumed run, before it writes its own lines

Nothing else protects the logs, and a lost line cannot be recomputed. A hash would show that a log was changed; the copy
also shows the row, and restores it. New lines are read and compressed once, so a checkpoint costs only the new lines
and one write of the compressed data.

A log only grows, with two exceptions that the copy follows: a resumed run cuts it to its checkpoint, so the copy holds
no line that this would cut; and flight.jsonl drops its oldest steps, so only those that it still has are compared.

What a model wrote is not copied but marked (`surefoot.report.log_marks`). Checkpoints of earlier versions have copies
of it, which are read.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from surefoot.report import events, journal, trainer_log
from surefoot.report.death import LOG
from surefoot.report.flight import FLIGHT, step_done
from surefoot.report.record import is_plain
from surefoot.system import durable, plain_files
from surefoot.system.errors import Fault, IntegrityError
from surefoot.system.messages import counted
from surefoot.training.manifest import FileCheck, damaged, unreadable

NAME = "logs.tar"
_FIX = "--resume repairs it"
_MOST = None  # any size: what was not read would be lost when a log is mended
_GZIP = 31  # zlib's window bits: 15 plus a gzip header without name and time, so that equal logs give equal bytes
Stays = Callable[[journal.Record, int, bool], bool]
# Whether a line is kept when the run resumes from a checkpoint; None: always.
GROWING: dict[str, Stays | None] = {
    trainer_log.NAME: trainer_log.stays,
    **{name: stays for name, stays in events.STAYS.items() if name not in events.TEXTS},
    LOG: None,
}
LOGS = (*GROWING, *events.TEXTS, FLIGHT)


class LogCopies:
    """The log copies of one run, written by one process."""

    def __init__(self, run: Path):
        self._run = run
        self._growing = {name: _Growing(run / name) for name in GROWING}

    def write(self, folder: Path, step: int, *, evaluated: bool) -> None:
        """Write the copies into a checkpoint folder that is about to be flushed.

        step: the checkpoint's step.
        evaluated: whether it is written after that step's evaluation.
        """
        for name, stays in GROWING.items():
            self._growing[name].grow(lambda record, stays=stays: stays is None or stays(record, step, evaluated))
        copies = {name: log.compressed() for name, log in self._growing.items() if log.lines}
        with suppress(OSError):
            # No time in the header, because checkpoints of two equal runs are compared byte by byte.
            copies[FLIGHT] = gzip.compress(plain_files.read_bytes(self._run / FLIGHT), mtime=0)
        archive = io.BytesIO()
        with tarfile.TarFile(fileobj=archive, mode="w") as tar:
            for name, copy in copies.items():
                entry = tarfile.TarInfo(f"{name}.gz")
                entry.size = len(copy)
                tar.addfile(entry, io.BytesIO(copy))
        durable.fill_bytes(folder / NAME, archive.getvalue())


class _Growing:
    """A growing log, compressed as far as it was read."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0
        self._compress, self._done = zlib.compressobj(wbits=_GZIP), bytearray()
        self.lines = 0  # compressed so far

    def grow(self, stays: Callable[[journal.Record], bool]) -> None:
        """Compress the new lines, except those at the end that a resume would cut. If the file became shorter, somebody
        else changed it; the copy then continues with the current content."""
        with suppress(OSError), self._path.open("rb") as file:  # an unreadable log must not stop the run
            if file.seek(0, io.SEEK_END) < self._read:
                self._read = 0
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
            # An incomplete line; the next checkpoint will contain it.
            if lines and not lines[-1].endswith(b"\n"):
                lines.pop()
            while lines and (record := journal.parse(lines[-1].decode(errors="replace"))) and not stays(record):
                lines.pop()
            self.lines += len(lines)
            new = b"".join(lines)
            self._read += len(new)
            self._done += self._compress.compress(new)

    def compressed(self) -> bytes:
        return bytes(self._done) + self._compress.copy().flush()


def has_copies(checkpoint: Path) -> bool:
    """Whether a checkpoint has copies; those of earlier versions do not."""
    return (checkpoint / NAME).is_file()


def check_logs(run: Path, checkpoint: Path) -> list[FileCheck]:
    """Compare a run's logs with the copies in one of its verified checkpoints, ignoring later lines. A fault names file
    and line. Raises IntegrityError if the copies cannot be read."""
    checks = []
    for name, copy in _read(checkpoint / NAME).items():
        there = _content(run / name)
        if there is None:
            what = f"is missing: {checkpoint.name} has {counted(len(copy.splitlines()), 'line')} of it"
            fault = damaged(run / name, what, _FIX)
        elif name == FLIGHT:
            fault = _recent_fault(run / name, copy, there, checkpoint)
        else:
            fault = _growing_fault(run / name, copy, there, checkpoint)
        checks.append(FileCheck(name, len(copy), hashlib.sha256(copy).hexdigest(), fault))
    return checks


def mend_logs(run: Path, checkpoint: Path) -> list[str]:
    """Restore lines that `check_logs` reports, and return what was wrong. The run must be locked. A kill leaves each
    file intact, and the next call completes the repair. Does nothing if the checkpoint has no copies."""
    if not has_copies(checkpoint):
        return []
    copies = _read(checkpoint / NAME)
    found = []
    for check in check_logs(run, checkpoint):
        path, copy = run / check.name, copies[check.name]
        if os.path.lexists(path) and not is_plain(path):
            continue  # a link or a device, which the writer refuses
        if check.fault is not None:
            found.append(f"{path}: {check.fault.what}; repaired from {checkpoint.name}")
        there = _content(path) or b""
        # Drop rows after the checkpoint, also damaged ones; and answers that were asked for before it and scored later.
        if check.name in (trainer_log.NAME, events.ANSWERS):
            new = copy
        elif check.fault is None:
            new = there
        else:
            new = copy if check.name == FLIGHT else copy + _later(copy, there)
        if new != there:
            durable.write_bytes(path, new)
    return found


def _read(path: Path) -> dict[str, bytes]:
    copies = {}
    try:
        with tarfile.open(path) as tar:
            for name in LOGS:
                with suppress(KeyError):  # missing in other versions
                    entry = tar.extractfile(f"{name}.gz")
                    assert entry is not None
                    with gzip.open(entry) as file:
                        copies[name] = file.read()
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise IntegrityError(unreadable(path, error)) from None
    return copies


def _content(path: Path) -> bytes | None:
    try:
        return plain_files.read_bytes(path, _MOST)
    except OSError:
        return None


def _growing_fault(path: Path, copy: bytes, there: bytes, checkpoint: Path) -> Fault | None:
    if there.startswith(copy):
        return None
    was, now = copy.split(b"\n"), there.split(b"\n")
    place = next((n for n, (one, other) in enumerate(zip(was, now, strict=False)) if one != other), len(now))
    if place >= len(now) - 1 and len(now) < len(was):
        what = f"ends in line {min(len(now), place + 1)}: {checkpoint.name} has {counted(len(was) - 1, 'line')} of it"
        return damaged(path, what, _FIX)
    return damaged(path, _change(place + 1, was[place], now[place], checkpoint), _FIX)


def _change(number: int, was: bytes, now: bytes, checkpoint: Path) -> str:
    """Describe the change of a line; for a record, the keys that differ."""
    when = f"when {checkpoint.name} was written"
    first, second = (journal.parse(line.decode(errors="replace")) for line in (was, now))
    if first is None or second is None:
        return f"line {number} is not as it was {when}"
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    changes = ", ".join(f"{key} {second.get(key)}, was {first.get(key)}" for key in keys)
    return f"line {number} is not as it was {when}: {changes or 'formatted differently'}"


def _recent_fault(path: Path, copy: bytes, there: bytes, checkpoint: Path) -> Fault | None:
    """Compare the completed steps: those still in the file must be the last ones of the copy, in order."""
    was = [line for line in copy.split(b"\n") if step_done(line) is not None]
    if not was:
        return None
    last = step_done(was[-1]) or 0
    lines = there.split(b"\n")
    steps = [step_done(line) for line in lines]
    places = [n for n, step in enumerate(steps) if step is not None and step <= last]
    later = any(step is not None and step > last for step in steps)
    kept = was[len(was) - len(places) :] if places else []
    place = next((n for n, line in zip(places, kept, strict=False) if lines[n] != line), None)
    if place is not None:
        what = _change(place + 1, kept[places.index(place)], lines[place], checkpoint)
        return damaged(path, what, _FIX)
    if len(places) > len(was) or not (places or later):
        return damaged(path, f"lacks steps that it had when {checkpoint.name} was written", _FIX)
    return None


def _later(copy: bytes, there: bytes) -> bytes:
    """The lines of a damaged file after its copy: after the copy's last line, or after as many lines."""
    lines, known = there.splitlines(keepends=True), copy.splitlines(keepends=True)
    if known and known[-1] in lines:
        return b"".join(lines[len(lines) - lines[::-1].index(known[-1]) :])
    return b"".join(lines[len(known) :])
