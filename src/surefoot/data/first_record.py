"""The first record of a source, and how trainers would lay out all of them. No more of a file is read than it takes."""

from __future__ import annotations

import gzip
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal

from surefoot.data.csv_rows import read_csv
from surefoot.data.files import decode, file_kind, named, require_file
from surefoot.data.formats.dialogue_text import is_dialogue, is_open_dialogue
from surefoot.data.json_rows import read_lines, read_list
from surefoot.data.kind import Kind
from surefoot.data.parquet_rows import read_parquet
from surefoot.data.rows import Row, Source, parse_record
from surefoot.data.sources import SourceSpec, files_of, open_sources
from surefoot.errors import Fault, InputError
from surefoot.families.templates import OWN

Learned = Literal["completion", "everything"]
_PIECE = 64 << 10  # bytes read at first; twice as many each time that they hold no whole record


def first_record(spec: SourceSpec) -> dict[str, Any]:
    """Its fields under the layout's names. Raises as `first_row`."""
    return first_row(spec)[1].value


def first_row(spec: SourceSpec) -> tuple[Source, Row]:
    """Where it comes from, and the record under the layout's names. Raises InputError for what is no data and for data
    without a record, EnvironmentFault for what cannot be reached."""
    files = files_of(spec)
    if files:
        name = str(files[0])
        kind = file_kind(name)
        require_file(files[0], name)
        with named(name):
            row = next(_records(files[0], name, kind), None)
        source = Source(name, kind, "", lambda: iter(()), format=spec.format, columns=spec.columns)
    else:
        source = open_sources(spec)[0]
        row = next(source.read(), None)
    if row is None:
        raise InputError(Fault(source.name, "0 records", "put at least one example into the file"))
    line, value = row
    if not isinstance(value, dict):
        raise InputError(Fault(f"{source.name}:{line}", "record 1 is no object with named fields"))
    return source, Row(1, line, parse_record(value, source, f"{source.name}:{line}"))


def laid_out(record: Mapping[str, Any], kind: Kind) -> tuple[str, Learned]:
    """The template and what carries loss, as trainers have it that take texts as they stand and lay out conversations
    with the tokenizer's template: of a prompt with its completion the completion, of all else every token."""
    prompt, text = record.get("prompt"), record.get("text")
    if kind == "answers":
        texts = isinstance(prompt, str) or (prompt is None and isinstance(text, str))
        return "raw" if texts else OWN, "everything" if prompt is None else "completion"
    better = record.get("chosen")
    if not isinstance(prompt if prompt is not None else better, str):
        return OWN, "completion"
    dialogue = is_open_dialogue(str(prompt)) if prompt is not None else is_dialogue(str(better))
    return "human-assistant" if dialogue else "raw", "completion"


def _records(path: Path, name: str, kind: str) -> Iterator[tuple[int, Any]]:
    if kind == ".txt":
        yield 1, {"text": ""}  # one record, whatever stands in it
    elif kind == ".parquet":
        with path.open("rb") as file:
            yield from read_parquet(name, file)
    else:
        with gzip.open(path, "rb") if name.lower().endswith(".gz") else path.open("rb") as file:
            yield from _whole(file, name, kind)


def _whole(file: BinaryIO | gzip.GzipFile, name: str, kind: str) -> Iterator[tuple[int, Any]]:
    """The first record of a text, where it has any: known to be whole by what follows it, or by the end of the file."""
    read = {".csv": read_csv, ".tsv": partial(read_csv, delimiter="\t"), ".json": read_list}
    data, size = b"", _PIECE
    while True:
        piece = file.read(size)
        data, size, ended = data + piece, 2 * size, len(piece) < size
        text = decode(name, data) if ended else data.decode("utf-8", errors="ignore").removeprefix("\ufeff")
        rows = read.get(kind, read_lines)(name, text)
        try:
            row = next(rows, None)
        except InputError:
            if ended:
                raise
            continue
        if ended or (row is not None and _goes_on(rows)):
            yield from [] if row is None else [row]
            return


def _goes_on(rows: Iterator[Any]) -> bool:
    """Whether something stands behind the first record: another one, or the beginning of one."""
    try:
        return next(rows, None) is not None
    except InputError:
        return True
