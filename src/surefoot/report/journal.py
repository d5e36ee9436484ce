"""JSON-lines files that a run appends to: the training log, the events, the samples, the answers.

A killed process loses no line that was written; a power failure can leave half a line at the end, which is dropped when
reading and cut off on resume. `durable.flush` makes lines survive a power failure.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.system import durable, plain_files
from surefoot.system.errors import Fault, IntegrityError

Record = dict[str, Any]
_BLOCK = 1 << 16  # bytes read at a time from the end of a file


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line to a file that `rewrite` has left without damage."""
    durable.append_lines(path, _json(record))


def read(path: Path, kind: str, is_sound: Callable[[Record], bool] = lambda record: True) -> list[Record]:
    """Return all records, oldest first; empty if there is no file. Raises IntegrityError naming a line that is not a
    JSON object or that `is_sound` rejects, or the file if it cannot be read.

    kind: what a line should be, for messages such as "is not a row of a training log".
    """
    records: list[Record] = []
    for number, record in _numbered(path):
        if record is None or not is_sound(record):
            raise IntegrityError(
                Fault(f"{path}:{number}", f"is not {kind}", "delete this line", code="SF-FILE-UNREADABLE")
            )
        records.append(record)
    return records


def salvage(path: Path) -> tuple[list[Record], list[int]]:
    """Return the readable records of a possibly damaged file, and the numbers of the unreadable lines. For reports; a
    run resumes from what `read` returns."""
    records: list[Record] = []
    damaged: list[int] = []
    for number, record in _numbered(path):
        damaged.append(number) if record is None else records.append(record)
    return records, damaged


def lines(path: Path) -> Iterator[tuple[int, int, Record]]:
    """Read a file of any size line by line: where each readable line begins and ends, in bytes, and its record."""
    begin = 0
    with path.open("rb") as file:
        for raw in file:
            record = parse(raw.decode(errors="replace"))
            if record is not None and raw.endswith(b"\n"):
                yield begin, begin + len(raw), record
            begin += len(raw)


def end_of(path: Path, stays: Callable[[Record], bool]) -> int:
    """Return where a file ends, in bytes, without the lines at its end that do not stay, and without half a line. Only
    these are read. 0 without a file."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            begin, raw = _last_line(file, end)
            record = parse(raw.decode(errors="replace"))
            if raw.endswith(b"\n") and record is not None and stays(record):
                break
            end = begin
    return end


def cut_end(path: Path, stays: Callable[[Record], bool]) -> None:
    """Cut a file as `end_of` says."""
    if path.exists() and (end := end_of(path, stays)) < path.stat().st_size:
        durable.shorten(path, end)


def rewrite(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file in one rename: a kill leaves the old or the new one."""
    durable.write_text(path, "".join(f"{_json(record)}\n" for record in records))


def parse(line: str) -> Record | None:
    """The record of one line, None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _last_line(file: BinaryIO, end: int) -> tuple[int, bytes]:
    """Return where the line begins that ends at `end`, and the line."""
    begin, raw = end, b""
    while begin and b"\n" not in raw[:-1]:
        count = min(_BLOCK, begin)
        begin -= count
        file.seek(begin)
        raw = file.read(count) + raw
    cut = raw.rfind(b"\n", 0, -1) + 1
    return begin + cut, raw[cut:]


def _numbered(path: Path) -> Iterator[tuple[int, Record | None]]:
    """Split at line feeds only: JSON strings may hold Unicode's other line separators."""
    if not path.exists():
        return
    try:
        content = plain_files.read_bytes(path)
    except OSError as error:
        raise IntegrityError(
            Fault(str(path), f"cannot be read: {error.strerror or error}", "restore it", code="SF-FILE-UNREADABLE")
        ) from None
    lines = content.decode("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, start=1):
        record = parse(line)
        if record is not None or number < len(lines):
            yield number, record


def _json(record: Mapping[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False, allow_nan=False)
