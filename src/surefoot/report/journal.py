"""JSON-lines files that a run appends to: the training log, the events, the samples.

A killed process loses no line that was written; a power failure can leave half a line at the end, which is dropped when
reading and cut off on resume. `durable.flush` makes lines survive a power failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surefoot.system import durable, plain_files
from surefoot.system.errors import Fault, IntegrityError

Record = dict[str, Any]


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
