"""Data files on this disk: JSON, JSON lines, CSV, TSV, Parquet, plain text; all but Parquet also gzipped.

A file is hashed when it is opened and read again when its records are wanted; one that changed in between is refused,
because a run must not train on other bytes than those it recorded.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.data.sources.json_rows import read_lines, read_list
from surefoot.data.sources.records import Source
from surefoot.data.sources.tables import read_csv, read_parquet
from surefoot.data.sources.text import decoded, pieces_of, unpacked
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.hardware import host_memory
from surefoot.system.locations import DATA_KINDS, data_kind
from surefoot.system.messages import size_text


def open_file(path: str | Path, name: str | None = None) -> Source:
    """A data file as a source. name: for messages and records, the path itself unless given. InputError when there is
    no such file or its name has no suffix of a data file."""
    path, name = Path(path), name or str(path)
    kind = file_kind(name)
    require_file(path, name)
    _require_room(path, name)
    with named(name):
        sha256 = durable.sha256_file(path)  # in pieces: the cache may make it needless to hold the whole file

    def read() -> Iterator[tuple[int, Any]]:
        with named(name), open(path, "rb") as file:
            try:
                yield from records_of(name, kind, file, os.fstat(file.fileno()).st_size)
            except InputError:
                _require_same(name, path, sha256)
                raise
            _require_same(name, path, sha256)

    return Source(name, kind, sha256, read)


def parse_bytes(name: str, kind: str, data: bytes) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record. name: of the file, for messages; one that ends in .gz says that data is packed."""
    return records_of(name, kind, io.BytesIO(data), len(data))


def records_of(name: str, kind: str, file: BinaryIO, size: int) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record, of which no more is read than is asked for, but for a piece of a text. size: of the
    file; for the rest see `parse_bytes`."""
    if kind == ".parquet":
        return read_parquet(name, file)
    text = decoded(name, unpacked(name, file, size) if name.lower().endswith(".gz") else pieces_of(file))
    if kind in (".csv", ".tsv"):
        return read_csv(name, text, delimiter="\t" if kind == ".tsv" else None)
    if kind == ".txt":
        return iter([(1, {"text": whole})] if (whole := "".join(text)).strip() else [])
    return read_list(name, text) if kind == ".json" else read_lines(name, text)


def file_kind(name: str) -> str:
    """Suffix that says how the content is parsed. InputError where there is none."""
    if (kind := data_kind(name)) is None:
        ends = Path(name).suffix
        what = f"ends in {ends}, which is no kind of data file" if ends else "has no suffix that says what it holds"
        raise InputError(
            Fault(name, what, f"known: {' '.join(DATA_KINDS)}, and .gz behind all but .parquet", code="SF-DATA-FILE")
        )
    return kind


def require_file(path: Path, name: str) -> None:
    """InputError for a FIFO, a socket or a device: it may be waited for without end, and is not there a second time."""
    with named(name):
        known = path.is_file() or path.is_dir() or not path.exists()  # the latter two have words of their own
    if not known:
        raise InputError(
            Fault(name, "is no regular file", "write what it gives into a file, and name that", code="SF-DATA-FILE")
        )


def _require_room(path: Path, name: str) -> None:
    """EnvironmentFault for a file that this machine's memory cannot hold: the kernel would end the command, in silence.
    Asked before it is hashed, since a file with holes can be larger than its disk."""
    with named(name):
        size = path.stat().st_size
    memory, _ = host_memory()
    if size > memory:
        what = f"has {size_text(size)}, and this machine's memory {size_text(memory)}"
        raise EnvironmentFault(Fault(name, what, "split it, and train on a part", code="SF-MEMORY"))


def _require_same(name: str, path: Path, sha256: str) -> None:
    if durable.sha256_file(path) != sha256:
        raise InputError(
            Fault(name, "changed while surefoot was reading it", "start again when it is complete", code="SF-DATA-FILE")
        )


@contextmanager
def named(name: str) -> Iterator[None]:
    """What reading a file may raise, in words."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            Fault(name, "no such file", "check the path; it is relative to the working folder", code="SF-FILE-MISSING")
        ) from None
    except IsADirectoryError:
        raise InputError(Fault(name, "is a folder, not a file", code="SF-DATA-FILE")) from None
    except OSError as error:
        raise EnvironmentFault(Fault(name, f"cannot be read: {error.strerror or error}", code="SF-DATA-FILE")) from None
