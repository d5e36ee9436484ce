"""The first record of a source, and how trainers would lay out all of them. No more of a file is read than it takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Literal

from surefoot.data.files import file_kind, named, records_of, require_file
from surefoot.data.formats.dialogue_text import is_dialogue, is_open_dialogue
from surefoot.data.kind import Kind
from surefoot.data.rows import Row, Source, parse_record
from surefoot.data.sources import SourceSpec, files_of, open_sources
from surefoot.families.templates import OWN
from surefoot.system.errors import Fault, InputError

Learned = Literal["completion", "everything"]


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
        with named(name), files[0].open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = kind == ".txt"  # one record, whatever stands in it
            row = (1, {"text": ""}) if whole else next(records_of(name, kind, file, size), None)
        source = Source(name, kind, "", lambda: iter(()), format=spec.format, columns=spec.columns)
    else:
        source = open_sources(spec)[0]
        row = next(source.read(), None)
    if row is None:
        raise InputError(
            Fault(source.name, "0 records", "put at least one example into the file", code="SF-DATA-EMPTY")
        )
    line, value = row
    if not isinstance(value, dict):
        raise InputError(Fault(f"{source.name}:{line}", "record 1 is no object with named fields", code="SF-DATA-ROW"))
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
