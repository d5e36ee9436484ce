"""Read the records of a data file lazily, and validate them.

Files are JSON, JSON lines, CSV, TSV, Parquet or plain text; all but Parquet may be gzipped. A `Source` is identified by
the SHA-256 of its content before any record is parsed, so data that was tokenized before is found in the cache by
hashing alone. `read_rows` reads the content a second time, record by record, and raises if it changed in between: a run
must train on the bytes whose hash it recorded. `surefoot.data.sources.resolve` creates sources.

`Kind` is what a stage learns from, and decides what a record becomes:

    answers  one example, whose answers are learned
    pairs    two neighboring examples with the same prompt: the better answer, then the worse
    judged   one example, whose answer is labeled good or bad
    prompts  one example without labels, which ends where the model begins to write
"""

from __future__ import annotations

import hashlib
import heapq
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.data.sources.record_values import composed, kind_of, slots
from surefoot.data.sources.tables import read_csv, read_parquet
from surefoot.data.sources.text import decoded, pieces_of, read_lines, read_list, read_value, unpacked
from surefoot.method_facts.methods import Records
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.hardware import host_memory
from surefoot.system.locations import DATA_KINDS, data_kind
from surefoot.system.messages import nearest_words, size_text

Kind = Records


def rows_per_item(kind: Kind) -> int:
    """Return how many neighboring examples one item has; a step takes all of them or none."""
    return 2 if kind == "pairs" else 1


_TABLES = (".csv", ".tsv", ".parquet")  # their cells may hold lists as JSON text
_JSON_CELLS = ("messages", "conversations", "tools", "history")
_LISTS_OR_TEXTS = ("prompt", "chosen", "rejected", "completion")  # lists of messages in some files, text in others


@dataclass(frozen=True)
class Source:
    """Records of one file or stream.

    name: name for messages, such as "data/train.csv".
    kind: file suffix that selects the parser.
    sha256: hex hash of the content; for a stream, of what determines it (commit, files, number of records).
    read: iterate over (line, value) of each record, lines from 1.
    format: "auto" or the name of a format.
    columns: the format's field name -> the file's field name.
    only_columns: ignore fields that are not in `columns`.
    tags: for the sharegpt format, tag of dataset_info.json (role_tag, content_tag, user_tag, …) -> the file's name;
        empty for the standard names.
    constant: the format's field name -> a text that stands in every record.
    compose: the format's field name -> a text with {{COLUMN}} of the record in it, see `composed`.
    system: system message of conversations without one; None: they stay without.
    drop_system: whether a system message in a record is left out.
    fill: NAME of a placeholder {{NAME}} in the texts -> the text in its place.
    sample: number of records to draw, by a hash of content and position; None: all.
    notes: how the source was resolved, in plain words.
    commit: commit of the hub data set it comes from.
    folder: base folder of the records' picture paths; None if there is none.
    """

    name: str
    kind: str
    sha256: str
    read: Callable[[], Iterator[tuple[int, Any]]] = field(repr=False, compare=False)
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    only_columns: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    constant: Mapping[str, str] = field(default_factory=dict)
    compose: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    drop_system: bool = False
    fill: Mapping[str, str] = field(default_factory=dict)
    sample: int | None = None
    notes: tuple[str, ...] = ()
    commit: str | None = None
    folder: Path | None = field(default=None, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that decides the rows of `read_rows` and their meaning, as JSON values."""
        # In no identity of older versions.
        later = {
            "constant": dict(self.constant),
            "compose": dict(self.compose),
            "system": self.system,
            "drop_system": self.drop_system,
            "fill": dict(self.fill),
        }
        return {
            **{name: value for name, value in later.items() if value},
            "sha256": self.sha256,
            "kind": self.kind,
            "format": self.format,
            "columns": dict(self.columns),
            "only_columns": self.only_columns,
            "tags": dict(self.tags),
            "sample": self.sample,
        }


@dataclass(frozen=True)
class Row:
    """One record under the format's field names.

    number: number in the file, from 1.
    line: line where it starts, from 1; in a Parquet file the row number.
    """

    number: int
    line: int
    value: dict[str, Any]


def parse_rows(source: Source) -> list[Row]:
    """Return all of `read_rows` as a list."""
    return list(read_rows(source))


def read_rows(source: Source) -> Iterator[Row]:
    """Iterate over the source's records, at least one. Raises InputError with the line (and column) of the first fault.
    Each call reads the source once, or twice if it is sampled (the first pass counts the records)."""
    if source.sample is None:
        yield from _all_rows(source)
        return
    chosen = _sampled(sum(1 for _ in _all_rows(source)), source, source.sample)
    for row, is_chosen in zip(_all_rows(source), chosen, strict=True):
        if is_chosen:
            yield row


def _all_rows(source: Source) -> Iterator[Row]:
    number, names = 0, {}
    for number, (line, value) in enumerate(source.read(), start=1):
        where = f"{source.name}:{line}"
        if not isinstance(value, dict):
            raise InputError(
                Fault(
                    where, f"record {number} is {kind_of(value)}, not an object with named fields", code="SF-DATA-ROW"
                )
            )
        _check_characters(value, where)
        names |= dict.fromkeys(value)
        yield Row(number, line, parse_record(value, source, where))
    if not number:
        raise InputError(
            Fault(source.name, "contains no records", "add at least one example to the file", code="SF-DATA-EMPTY")
        )
    _check_columns(source, names)


def parse_record(value: dict[str, Any], source: Source, where: str) -> dict[str, Any]:
    """Rename a record's fields to the format's names, and parse lists that a table holds as JSON text.

    where: place of the record, for InputErrors.
    """
    made = {field: composed(text, value, where) for field, text in source.compose.items()}
    return _parse_cells(_renamed(value, source) | made, where, source.kind)


def _renamed(value: dict[str, Any], source: Source) -> dict[str, Any]:
    """Rename the record's fields by `source.columns`. A column replaces a field that already has the format's name."""
    if not source.columns and not source.only_columns and not source.compose:
        return {**value, **source.constant} if source.constant else value
    written = {name for text in source.compose.values() for name, _ in slots(text, value)}
    taken = {*source.columns.values(), *source.columns, *written}
    kept = {} if source.only_columns else {name: item for name, item in value.items() if name not in taken}
    return kept | {field: value[own] for field, own in source.columns.items() if own in value} | dict(source.constant)


def _check_columns(source: Source, names: Iterable[str]) -> None:
    """Raise InputError for a configured column that no record has; one that only some records lack is optional.
    dataset_info.json may list standard fields that the file does not have."""
    names, faults = list(names), []
    for layout_field, own in source.columns.items():
        if own in names or (source.only_columns and own == layout_field):
            continue
        near = nearest_words(own, names, 2)
        fix = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(map(repr, names))}"
        faults.append(
            Fault(
                source.name, f"no record has the column {own!r} (set for {layout_field!r})", fix, code="SF-DATA-FORMAT"
            )
        )
    if faults:
        raise InputError(faults)


def _sampled(rows: int, source: Source, count: int) -> list[bool]:
    """Choose `count` rows by a hash of content and position, the same on every machine: [rows] bool."""
    if count > rows:
        what = f"num_samples is {count}, but there are only {rows} records"
        raise InputError(
            Fault(source.name, what, "lower it; to repeat records, set weight or epochs", code="SF-DATA-SHARES")
        )
    drawn = heapq.nsmallest(
        count, range(1, rows + 1), key=lambda number: hashlib.sha256(f"{source.sha256}:{number}".encode()).digest()
    )
    chosen = set(drawn)
    return [number in chosen for number in range(1, rows + 1)]


def _parse_cells(value: dict[str, Any], where: str, kind: str) -> dict[str, Any]:
    """Parse the cells of a table that hold lists as JSON text; an empty cell becomes None."""
    if kind not in _TABLES:
        return value
    for name in _JSON_CELLS:
        if isinstance(text := value.get(name), str):
            value[name] = _parse_cell(text, f"{where} column {name!r}") if text.strip() else None
    for name in _LISTS_OR_TEXTS:
        if isinstance(text := value.get(name), str) and (turns := _turns(text)) is not None:
            value[name] = turns
    return value


def _turns(text: str) -> list[Any] | None:
    """Parse a list of messages written as JSON; None for any other text, also one that begins with a bracket."""
    if not text.lstrip().startswith("["):
        return None
    try:
        found = read_value("", text)
    except InputError:
        return None
    turn_keys = ("role", "from")
    whole = isinstance(found, list) and found and all(isinstance(one, dict) for one in found)
    return found if whole and any(key in found[0] for key in turn_keys) else None


def _parse_cell(text: str, where: str) -> Any:
    try:
        return read_value(where, text)
    except InputError:
        if "'" not in text[:8]:
            raise
        what = "the cell is not JSON but looks like a Python literal"
        raise InputError(Fault(where, what, "write it with json.dumps", code="SF-DATA-ROW")) from None


def _check_characters(value: dict[str, Any], where: str) -> None:
    """Refuse lone surrogates and NUL, which \\u escapes can produce: tokenizers and file writes would fail on them
    later, without naming the line."""
    if _is_text("".join(texts := _texts(value))):
        return
    item = next(item for item in texts if not _is_text(item))  # lone surrogates stay invalid when texts are joined
    what = "holds NUL (\\u0000)" if "\0" in item else "holds half of a character (a lone \\ud800-\\udfff)"
    raise InputError(Fault(where, f"the record that starts here {what}", "remove it from the text", code="SF-DATA-ROW"))


def _texts(value: dict[str, Any]) -> list[str]:
    """Return every string in a record, field names included."""
    texts: list[str] = []
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            texts.append(item)
        elif isinstance(item, dict):
            texts += item
            pending += item.values()
        elif isinstance(item, list):
            pending += item
    return texts


def _is_text(item: str) -> bool:
    if item.isascii():
        return "\0" not in item
    try:
        item.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return "\0" not in item


def open_file(path: str | Path, name: str | None = None) -> Source:
    """Open a data file as a source: hash it, but do not parse it.

    name: name for messages and logs; None: the path.

    Raises InputError if the file does not exist or its suffix is not that of a data file.
    """
    path, name = Path(path), name or str(path)
    kind = file_kind(name)
    require_file(path, name)
    _require_room(path, name)
    with file_faults(name):
        sha256 = durable.sha256_file(path)  # in chunks, without loading the file into memory

    def read() -> Iterator[tuple[int, Any]]:
        with file_faults(name), open(path, "rb") as file:
            try:
                yield from records_of(name, kind, file, os.fstat(file.fileno()).st_size)
            except InputError:
                # If the file changed while it was read, report that instead of the malformed record it causes.
                _require_same(name, path, sha256)
                raise
            _require_same(name, path, sha256)

    return Source(name, kind, sha256, read, folder=path.parent)


def parse_bytes(name: str, kind: str, data: bytes) -> Iterator[tuple[int, Any]]:
    """Iterate over (line, value) of each record in the content of a file.

    name: the file's name, for messages; data is decompressed if it ends in .gz.
    """
    return records_of(name, kind, io.BytesIO(data), len(data))


def records_of(name: str, kind: str, file: BinaryIO, size: int) -> Iterator[tuple[int, Any]]:
    """Iterate lazily over (line, value) of each record of an open file.

    size: bytes of the file; for the rest see `parse_bytes`.
    """
    if kind == ".parquet":
        return read_parquet(name, file)
    text = decoded(name, unpacked(name, file, size) if name.lower().endswith(".gz") else pieces_of(file))
    if kind in (".csv", ".tsv"):
        return read_csv(name, text, delimiter="\t" if kind == ".tsv" else None)
    if kind == ".txt":
        return iter([(1, {"text": whole})] if (whole := "".join(text)).strip() else [])
    return read_list(name, text) if kind == ".json" else read_lines(name, text)


def file_kind(name: str) -> str:
    """Return the suffix that selects the parser. Raises InputError if it is not that of a data file."""
    if (kind := data_kind(name)) is None:
        ends = Path(name).suffix
        what = f"ends in {ends}, which is not a known data format" if ends else "has no suffix that names its format"
        fix = f"known suffixes: {' '.join(DATA_KINDS)}; all but .parquet may be followed by .gz"
        raise InputError(Fault(name, what, fix, code="SF-DATA-FILE"))
    return kind


def require_file(path: Path, name: str) -> None:
    """Raise InputError for a FIFO, a socket or a device: reading it may block forever, and it can be read only once."""
    with file_faults(name):
        known = path.is_file() or path.is_dir() or not path.exists()  # the last two are reported elsewhere
    if not known:
        raise InputError(
            Fault(name, "is not a regular file", "save its content to a file and use that", code="SF-DATA-FILE")
        )


def _require_room(path: Path, name: str) -> None:
    """Raise EnvironmentFault for a file larger than this machine's memory: the kernel would kill the process without a
    message. Checked before hashing, since a sparse file can be larger than its disk."""
    with file_faults(name):
        size = path.stat().st_size
    memory, _ = host_memory()
    if size > memory:
        what = f"has {size_text(size)}, but this machine has {size_text(memory)} of memory"
        raise EnvironmentFault(Fault(name, what, "split it, and train on a part", code="SF-MEMORY"))


def _require_same(name: str, path: Path, sha256: str) -> None:
    if durable.sha256_file(path) != sha256:
        raise InputError(
            Fault(name, "changed while surefoot was reading it", "restart once it is complete", code="SF-DATA-FILE")
        )


@contextmanager
def file_faults(name: str) -> Iterator[None]:
    """Turn the OSErrors of reading a file into Faults."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            Fault(name, "no such file", "check the path; it is relative to the working folder", code="SF-FILE-MISSING")
        ) from None
    except IsADirectoryError:
        raise InputError(Fault(name, "is a folder, not a file", code="SF-DATA-FILE")) from None
    except OSError as error:
        raise EnvironmentFault(
            Fault(name, f"cannot be read: {error.strerror or error}", code="SF-FILE-UNREADABLE")
        ) from None
