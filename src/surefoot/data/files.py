"""Data files on this disk: JSON, JSON lines, CSV, TSV, Parquet, plain text; all but Parquet also gzipped.

A file is hashed when it is opened and read again when its records are wanted; one that changed in between is refused,
because a run must not train on other bytes than those it recorded.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surefoot import durable
from surefoot.data.csv_rows import read_csv
from surefoot.data.json_rows import read_lines, read_list
from surefoot.data.parquet_rows import read_parquet
from surefoot.data.rows import Source
from surefoot.errors import EnvironmentFault, Fault, InputError
from surefoot.hardware import host_memory
from surefoot.locations import DATA_KINDS, data_kind
from surefoot.sizes import size_text

_RATIO = 200  # unpacked to packed; text reaches 3 to 20, gzip's most is 1,030
_SMALL = 64 << 20  # bytes that may be unpacked whatever the ratio: rows alike may be packed well


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
        data = _read(path, name)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise InputError(Fault(name, "changed while surefoot was reading it", "start again when it is complete"))
        return parse_bytes(name, kind, data)

    return Source(name, kind, sha256, read)


def parse_bytes(name: str, kind: str, data: bytes) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record. name: of the file, for messages; one that ends in .gz says that data is packed."""
    if kind == ".parquet":
        return read_parquet(name, data)
    text = decode(name, _unpack(name, data) if name.lower().endswith(".gz") else data)
    if kind in (".csv", ".tsv"):
        return read_csv(name, text, delimiter="\t" if kind == ".tsv" else None)
    if kind == ".txt":
        return iter([(1, {"text": text})] if text.strip() else [])
    return read_list(name, text) if kind == ".json" else read_lines(name, text)


def file_kind(name: str) -> str:
    """Suffix that says how the content is parsed. InputError where there is none."""
    if (kind := data_kind(name)) is None:
        ends = Path(name).suffix
        what = f"ends in {ends}, which is no kind of data file" if ends else "has no suffix that says what it holds"
        raise InputError(Fault(name, what, f"known: {' '.join(DATA_KINDS)}, and .gz behind all but .parquet"))
    return kind


def require_file(path: Path, name: str) -> None:
    """InputError for a FIFO, a socket or a device: it may be waited for without end, and is not there a second time."""
    with named(name):
        known = path.is_file() or path.is_dir() or not path.exists()  # the latter two have words of their own
    if not known:
        raise InputError(Fault(name, "is no regular file", "write what it gives into a file, and name that"))


def _require_room(path: Path, name: str) -> None:
    """EnvironmentFault for a file that this machine's memory cannot hold: the kernel would end the command, in silence.
    Asked before it is hashed, since a file with holes can be larger than its disk."""
    with named(name):
        size = path.stat().st_size
    memory, _ = host_memory()
    if size > memory:
        what = f"has {size_text(size)}, and this machine's memory {size_text(memory)}"
        raise EnvironmentFault(Fault(name, what, "split it, and train on a part"))


def _read(path: Path, name: str) -> bytes:
    with named(name):
        return path.read_bytes()


@contextmanager
def named(name: str) -> Iterator[None]:
    """What reading a file may raise, in words."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(Fault(name, "no such file", "check the path; it is relative to the working folder")) from None
    except IsADirectoryError:
        raise InputError(Fault(name, "is a folder, not a file")) from None
    except OSError as error:
        raise EnvironmentFault(Fault(name, f"cannot be read: {error.strerror or error}")) from None


def _unpack(name: str, data: bytes) -> bytes:
    """InputError for what unpacks to far more than text does: a small file could fill the memory."""
    most = max(_SMALL, _RATIO * len(data))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as packed:
            unpacked = packed.read(most + 1)
    except (OSError, EOFError, zlib.error):
        raise InputError(Fault(name, "is not, or not wholly, gzip", "it looks cut off or misnamed")) from None
    if len(unpacked) > most:
        what = f"unpacks to more than {_RATIO} times its size, which no text does"
        raise InputError(Fault(name, what, "unpack it by hand if you trust it"))
    return unpacked


def decode(name: str, data: bytes) -> str:
    """The text of a whole file. InputError with the line where it is not UTF-8."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise InputError(Fault(f"{name}:1", "is UTF-16", "save the file as UTF-8"))
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        where = f"{name}:{line}"
        if error.end >= len(data) and "unexpected end" in error.reason:
            raise InputError(Fault(where, "the file ends in the middle of a character", "it looks cut off")) from None
        what = f"byte 0x{data[error.start]:02x} at offset {error.start} is not UTF-8"
        raise InputError(Fault(where, what, "save the file as UTF-8")) from None
