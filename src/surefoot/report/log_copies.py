"""A run's logs beside each checkpoint, as far as they had come: `logs.tar`, a gzip file of each.

    copies = LogCopies(run)                      # once in a process
    copies.write(staging, step, evaluated)       # into each checkpoint, under its manifest
    check_logs(run, checkpoint)                  # `surefoot verify`: which row is not as it was
    mend_logs(run, checkpoint)                   # a resumed run, before it writes its own lines

Nothing else vouches for what a log says, and what is lost of it cannot be had twice. A hash would tell that a log was
changed; the copy also tells the row, and gives it back. What a log has gained since the last checkpoint is read and
compressed once, so a checkpoint costs what is new and one write of what is compressed.

A log only grows, but for two rules, and the copy goes by both: a resumed run cuts it to its checkpoint, so the copy
holds no line that this would cut; and flight.jsonl forgets its oldest steps, so only those that it still has are
compared.
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
_FIX = "--resume mends it"
_GZIP = 31  # of zlib's window bits: 15, and a header without name and time, so that equal logs are equal bytes
Stays = Callable[[journal.Record, int, bool], bool]
# Whether a line stays when the run goes on from a checkpoint; None: all of them do.
GROWING: dict[str, Stays | None] = {trainer_log.NAME: trainer_log.stays, **events.STAYS, LOG: None}
LOGS = (*GROWING, FLIGHT)


class LogCopies:
    """Of one run, by one process."""

    def __init__(self, run: Path):
        self._run = run
        self._growing = {name: _Growing(run / name) for name in GROWING}

    def write(self, folder: Path, step: int, *, evaluated: bool) -> None:
        """Into a folder that is about to be flushed.

        step: of the checkpoint.
        evaluated: whether it is written after the evaluation of that very step.
        """
        for name, stays in GROWING.items():
            self._growing[name].grow(lambda record, stays=stays: stays is None or stays(record, step, evaluated))
        copies = {name: log.compressed() for name, log in self._growing.items() if log.lines}
        with suppress(OSError):
            # No time in the header: checkpoints of two equal runs are compared byte by byte.
            copies[FLIGHT] = gzip.compress(plain_files.read_bytes(self._run / FLIGHT), mtime=0)
        archive = io.BytesIO()
        with tarfile.TarFile(fileobj=archive, mode="w") as tar:
            for name, copy in copies.items():
                entry = tarfile.TarInfo(f"{name}.gz")
                entry.size = len(copy)
                tar.addfile(entry, io.BytesIO(copy))
        durable.fill_bytes(folder / NAME, archive.getvalue())


class _Growing:
    """A log that is appended to, compressed as far as it was read."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0
        self._compress, self._done = zlib.compressobj(wbits=_GZIP), bytearray()
        self.lines = 0  # taken in

    def grow(self, stays: Callable[[journal.Record], bool]) -> None:
        """Take in the new lines, but for those at the end that do not stay. A file that became shorter was changed by
        somebody else: the copy goes on with what is there now, and differs from it from then on."""
        with suppress(OSError), self._path.open("rb") as file:  # a log that cannot be read is no reason to stop
            if file.seek(0, io.SEEK_END) < self._read:
                self._read = 0
            file.seek(self._read)
            lines = file.read().splitlines(keepends=True)
            # A line that is being written; the next checkpoint takes it.
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
    """Not those of earlier versions."""
    return (checkpoint / NAME).is_file()


def check_logs(run: Path, checkpoint: Path) -> list[FileCheck]:
    """The logs of a run against the copies in a checkpoint of it that verifies. Lines that came later are not looked
    at. A fault names the file and the line. Raises IntegrityError where the copies cannot be read."""
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
    """Give the logs back what `check_logs` misses, and return what was wrong. Call it with the run locked. A kill in
    between leaves each file whole, and the next call ends the work. Nothing where the checkpoint has no copies."""
    if not has_copies(checkpoint):
        return []
    copies = _read(checkpoint / NAME)
    found = []
    for check in check_logs(run, checkpoint):
        path, copy = run / check.name, copies[check.name]
        if os.path.lexists(path) and not is_plain(path):
            continue  # a link or a device: whoever writes to it refuses
        if check.fault is not None:
            found.append(f"{path}: {check.fault.what}; mended from {checkpoint.name}")
        there = _content(path) or b""
        if check.name == trainer_log.NAME:  # rows after the checkpoint go, damaged ones too
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
                with suppress(KeyError):  # of another version
                    entry = tar.extractfile(f"{name}.gz")
                    assert entry is not None
                    with gzip.open(entry) as file:
                        copies[name] = file.read(plain_files.MOST)
    except (OSError, EOFError, tarfile.TarError, zlib.error) as error:
        raise IntegrityError(unreadable(path, error)) from None
    return copies


def _content(path: Path) -> bytes | None:
    try:
        return plain_files.read_bytes(path)
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
    """What became of a line: of a record the keys that differ."""
    when = f"when {checkpoint.name} was written"
    first, second = (journal.parse(line.decode(errors="replace")) for line in (was, now))
    if first is None or second is None:
        return f"line {number} is not as it was {when}"
    keys = [key for key in {**first, **second} if first.get(key) != second.get(key)]
    changes = ", ".join(f"{key} {second.get(key)}, was {first.get(key)}" for key in keys)
    return f"line {number} is not as it was {when}: {changes or 'written otherwise'}"


def _recent_fault(path: Path, copy: bytes, there: bytes, checkpoint: Path) -> Fault | None:
    """Of the steps that were done: those still there are the last ones of the copy, in its order."""
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
        return damaged(path, f"has not the steps that it had when {checkpoint.name} was written", _FIX)
    return None


def _later(copy: bytes, there: bytes) -> bytes:
    """The lines of a damaged file that came after its copy: behind the copy's last line, or behind as many lines."""
    lines, known = there.splitlines(keepends=True), copy.splitlines(keepends=True)
    if known and known[-1] in lines:
        return b"".join(lines[len(lines) - lines[::-1].index(known[-1]) :])
    return b"".join(lines[len(known) :])
