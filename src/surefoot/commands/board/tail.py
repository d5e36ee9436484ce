"""Following a file of JSON lines that another process appends to, and sometimes cuts.

A place in the file is its length so far with a checksum of all before it. So a reader that comes back with a place is
told truly whether what it has is still the beginning of the file: a resumed run cuts its log and may write other rows
to the same length.
"""

from __future__ import annotations

import os
import re
import zlib
from pathlib import Path

from surefoot.report.journal import Record, parse
from surefoot.report.record import is_plain

_PLACE = re.compile(r"([0-9]{1,15})-([0-9]{1,10})")


class Tail:
    """records: of all whole lines so far; damaged ones are left out."""

    def __init__(self, path: Path):
        self._path = path
        self._reset()

    def _reset(self) -> None:
        self.records: list[Record] = []
        self._length = self._checksum = 0
        self._file: tuple[int, int] | None = None  # device and inode

    @property
    def place(self) -> str:
        return f"{self._length}-{self._checksum}"

    def resume(self, place: str) -> bool:
        """Take in what lies before a place that an earlier reader had. False, and nothing taken, where the file no
        longer begins so. Call it first."""
        found = _PLACE.fullmatch(place)
        if found is None:
            return False
        self._read(most=int(found[1]))
        if self.place == place:
            return True
        self._reset()
        return False

    def read(self) -> bool:
        """Take in what is new. Whether the file was cut or replaced, so that `records` begin anew."""
        return self._read(most=None)

    def _read(self, most: int | None) -> bool:
        if not is_plain(self._path):
            cut = self._length > 0
            self._reset()
            return cut
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            cut = self._length > 0 and (status.st_size < self._length or identity != self._file)
            if cut:
                self._reset()
            self._file = identity
            file.seek(self._length)
            self._take(file.read() if most is None else file.read(most))
        return cut

    def _take(self, data: bytes) -> None:
        """Whole lines; the half one at the end waits for its rest."""
        whole = data[: data.rfind(b"\n") + 1]
        self._length += len(whole)
        self._checksum = zlib.crc32(whole, self._checksum)
        for line in whole.decode("utf-8", errors="replace").split("\n")[:-1]:
            record = parse(line)
            if record is not None:
                self.records.append(record)


def last_records(path: Path, most: int = 1 << 16) -> list[Record]:
    """The records in the last `most` bytes, for a glance at a file that may be long."""
    if not is_plain(path):
        return []
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        lines = file.read(most).decode("utf-8", errors="replace").split("\n")
    records = (parse(line) for line in (lines[1:] if start else lines))
    return [record for record in records if record is not None]
