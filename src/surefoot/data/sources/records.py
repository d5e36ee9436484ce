"""A file of records, and the records themselves: read lazily, refused where they are not intact.

Files are JSON, JSON lines, CSV, TSV, Parquet or plain text; all but Parquet may be gzipped. A `Source` is identified by
the SHA-256 of its content before any record is parsed, so data that was tokenised before is found in the cache for the
price of a hash. `read_rows` reads the content a second time, one record after the other, and refuses it if it changed
in between: a run must not train on other bytes than those it recorded. `surefoot.data.sources.resolve` makes sources.

`Kind` says what a stage learns from, and so what a record becomes:

    answers  one example, whose answers are learned
    pairs    two neighbouring examples, the better answer and then the worse, both behind the same prompt
    judged   one example, whose answer is known to be good or bad
    prompts  one example that ends where the model begins to write, with nothing to learn
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
    """Examples that belong together, and of which a step takes all or none."""
    return 2 if kind == "pairs" else 1


_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_TABLES = (".csv", ".tsv", ".parquet")  # their cells hold no lists, or only some of them do
_JSON_CELLS = ("messages", "conversations", "tools", "history")
_LISTS_OR_TEXTS = ("prompt", "chosen", "rejected", "completion")  # lists of messages in some files, texts in others


@dataclass(frozen=True)
class Source:
    """Records of one file, or of one stream.

    name: as the user would recognise it, such as "data/train.csv".
    kind: suffix that says how its content is parsed.
    sha256: of its content, in hexadecimal; of a stream, of what fixes its content (commit, files, number of records).
    read: (line, value) of each record, lines from 1.
    format: auto or a layout's name.
    columns: the layout's field -> the file's own name.
    only_columns: fields that are not among the columns are not read.
    tags: of the sharegpt layout, dataset_info.json's own words (role_tag, content_tag, user_tag, …) -> the file's;
        empty: the layout's usual ones.
    sample: so many records, chosen by the content itself.
    notes: what was recognised, in plain words.
    commit: of the hub data set it comes from.
    folder: below which the records name pictures; None where there is none.
    """

    name: str
    kind: str
    sha256: str
    read: Callable[[], Iterator[tuple[int, Any]]] = field(repr=False, compare=False)
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    only_columns: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)
    sample: int | None = None
    notes: tuple[str, ...] = ()
    commit: str | None = None
    folder: Path | None = field(default=None, compare=False)

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides which rows `read_rows` gives, and how they are to be understood; JSON values."""
        return {
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
    """One record, its fields under the layout's names.

    number: its place in the file, from 1.
    line: where it starts, from 1; in a Parquet file its number.
    """

    number: int
    line: int
    value: dict[str, Any]


def parse_rows(source: Source) -> list[Row]:
    """All of `read_rows`, held in memory."""
    return list(read_rows(source))


def read_rows(source: Source) -> Iterator[Row]:
    """The records of the source, at least one. InputError names the line (and column) of the first fault. Each call
    reads the source once; of a sample twice, to count first."""
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
            Fault(source.name, "0 records", "put at least one example into the file", code="SF-DATA-EMPTY")
        )
    _check_columns(source, names)


def parse_record(value: dict[str, Any], source: Source, where: str) -> dict[str, Any]:
    """One record's fields under the layout's names, lists that a table keeps as text read.

    where: for InputErrors.
    """
    return _parse_cells(_renamed(value, source), where, source.kind)


def kind_of(value: Any) -> str:
    """A JSON value's type in words."""
    return "an empty list" if value == [] else _KINDS[type(value)]


def _renamed(value: dict[str, Any], source: Source) -> dict[str, Any]:
    """The record's fields under the layout's names. A column hides a field of the file that has the layout's name."""
    if not source.columns and not source.only_columns:
        return value
    taken = {*source.columns.values(), *source.columns}
    kept = {} if source.only_columns else {name: item for name, item in value.items() if name not in taken}
    return kept | {field: value[own] for field, own in source.columns.items() if own in value}


def _check_columns(source: Source, names: Iterable[str]) -> None:
    """A named column that no record has is a slip of the pen; one that only some records lack is optional there. A
    description lists what is read and may list more than a file has."""
    names, faults = list(names), []
    for layout_field, own in source.columns.items():
        if own in names or (source.only_columns and own == layout_field):
            continue
        near = nearest_words(own, names, 2)
        fix = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {', '.join(map(repr, names))}"
        faults.append(
            Fault(
                source.name, f"no record has the column {own!r}, named for {layout_field!r}", fix, code="SF-DATA-FORMAT"
            )
        )
    if faults:
        raise InputError(faults)


def _sampled(rows: int, source: Source, count: int) -> list[bool]:
    """Of each row whether it is one of `count`, picked by a hash of content and place: the same on every machine."""
    if count > rows:
        what = f"num_samples is {count}, and there are {rows} records"
        raise InputError(
            Fault(source.name, what, "lower it; records are repeated with weight or epochs", code="SF-DATA-SHARES")
        )
    drawn = heapq.nsmallest(
        count, range(1, rows + 1), key=lambda number: hashlib.sha256(f"{source.sha256}:{number}".encode()).digest()
    )
    chosen = set(drawn)
    return [number in chosen for number in range(1, rows + 1)]


def _parse_cells(value: dict[str, Any], where: str, kind: str) -> dict[str, Any]:
    """Tables keep lists as JSON text; an empty cell is none."""
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
    """A list of messages written as JSON; None for a text, which may well begin with a bracket."""
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
        what = "the cell is not JSON; it looks like a Python literal"
        raise InputError(Fault(where, what, "write it with json.dumps", code="SF-DATA-ROW")) from None


def _check_characters(value: dict[str, Any], where: str) -> None:
    """Half characters and NUL come in through \\u escapes; tokenizers and files fail on them later, without a line."""
    if _is_text("".join(texts := _texts(value))):
        return
    item = next(item for item in texts if not _is_text(item))  # no two halves make a whole: they stay apart in a text
    what = "holds NUL (\\u0000)" if "\0" in item else "holds half of a character (a lone \\ud800-\\udfff)"
    raise InputError(Fault(where, f"the record that starts here {what}", "remove it from the text", code="SF-DATA-ROW"))


def _texts(value: dict[str, Any]) -> list[str]:
    """Every text in a record, names of fields included."""
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
    """A data file as a source.

    name: for messages and records, the path itself unless given.

    InputError when there is no such file or its name has no suffix of a data file.
    """
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
                # A file that changed under the reader explains whatever looks malformed.
                _require_same(name, path, sha256)
                raise
            _require_same(name, path, sha256)

    return Source(name, kind, sha256, read, folder=path.parent)


def parse_bytes(name: str, kind: str, data: bytes) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record.

    name: of the file, for messages; one that ends in .gz says that data is packed.
    """
    return records_of(name, kind, io.BytesIO(data), len(data))


def records_of(name: str, kind: str, file: BinaryIO, size: int) -> Iterator[tuple[int, Any]]:
    """(line, value) of each record, of which no more is read than is asked for, but for a piece of a text.

    size: of the file; for the rest see `parse_bytes`.
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
        raise EnvironmentFault(
            Fault(name, f"cannot be read: {error.strerror or error}", code="SF-FILE-UNREADABLE")
        ) from None
