"""Resolve a data source of a config: a file, a folder, an entry of dataset_info.json, or a hub data set.

`open_sources` resolves the path and hashes the files without parsing them (`surefoot.data.sources.records.read_rows`
does that). `first_row` and `first_record` parse only the first record, for checks before a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.data.formats.preference import is_dialogue, is_open_dialogue
from surefoot.data.sources.dataset_info import Entry, inside, read_description, read_entry
from surefoot.data.sources.hub import HubData, open_hub, stream_hub
from surefoot.data.sources.hub_files import Chosen, Splits, choose_files, is_data
from surefoot.data.sources.records import (
    Kind,
    Row,
    Source,
    file_faults,
    file_kind,
    open_file,
    parse_record,
    records_of,
    require_file,
)
from surefoot.families.templates import OWN
from surefoot.method_facts.methods import methods_for
from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import DATA_KINDS, DESCRIPTION, is_hub_data


@dataclass(frozen=True)
class SourceSpec:
    """One entry of data.train or data.eval, as plain values.

    path: file, folder or hub id.
    format: "auto" or the name of a format.
    columns: the format's field name -> the file's field name.
    constant, compose, system, drop_system, fill: see `Source`.
    name: entry of the folder's dataset_info.json.
    split: split of a folder or hub data set; of several names, the first that exists is used.
    subset, revision, streaming: for hub data sets only.
    max_samples: number of records to use, from the start; None: all.
    weight, epochs: share in the mixture, see `surefoot.data.batching.order`.
    share: (relative sizes of the parts, number of the part to use, from 1, whether in the files' order); None: all.
    kind: what is learned from the records; an entry of another kind is refused.
    """

    path: str
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    constant: Mapping[str, str] = field(default_factory=dict)
    compose: Mapping[str, str] = field(default_factory=dict)
    system: str | None = None
    drop_system: bool = False
    fill: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    subset: str | None = None
    split: str | Splits = "train"
    revision: str | None = None
    streaming: bool = False
    max_samples: int | None = None
    weight: float | None = None
    epochs: float | None = None
    share: tuple[tuple[float, ...], int, bool] | None = None
    kind: Kind = "answers"


def open_sources(spec: SourceSpec) -> tuple[Source, ...]:
    """Resolve a spec to its files, at least one, in a stable order. Files are hashed but not parsed.

    The caller applies max_samples across the sources; only a stream stops after max_samples records by itself.

    Raises InputError for a missing path or contradictory settings, EnvironmentFault if the hub cannot be reached.
    """
    if is_hub_data(spec.path):
        sources = _open_hub(spec, HubData(spec.path, spec.subset, spec.split, spec.revision))
    elif spec.streaming:
        raise InputError(
            Fault(spec.path, "is a local path; only hub data can be streamed", "remove streaming", code="SF-DATA-HUB")
        )
    elif not Path(spec.path).is_dir():
        sources = (open_file(spec.path),)
    elif (entries := read_description(Path(spec.path), spec.path)) is not None:
        return _open_described(spec, entries)
    elif spec.name is not None:
        raise InputError(
            Fault(
                spec.path,
                f"has no {DESCRIPTION}, so there is no entry {spec.name!r}",
                "remove name",
                code="SF-DATA-DESCRIPTION",
            )
        )
    else:
        sources = _open_folder(spec.path, spec.split)
    return tuple(replace(source, format=spec.format, columns=spec.columns, **_texts(spec)) for source in sources)


def _texts(spec: SourceSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("constant", "compose", "system", "drop_system", "fill")}


def files_of(spec: SourceSpec) -> tuple[Path, ...]:
    """Return the files of a spec that is a file or a plain folder; () for anything else."""
    path = Path(spec.path)
    if is_hub_data(spec.path) or spec.streaming or spec.name is not None:
        return ()
    if not path.is_dir():
        return (path,)
    if read_description(path, spec.path) is not None:
        return ()
    return tuple(path / file for file in _chosen(spec.path, spec.split)[0].files)


def _open_folder(path: str, split: str | Splits) -> tuple[Source, ...]:
    chosen, several = _chosen(path, split)
    notes = (f"of the folder, {chosen.part}: {chosen.reason}",) if several else ()
    return tuple(replace(open_file(Path(path) / file), notes=notes) for file in chosen.files)


def _chosen(path: str, split: str | Splits) -> tuple[Chosen, bool]:
    """Choose the folder's data files that belong to this split, by the same rules as for a hub repository. Return them
    and whether the folder has several data files. Subfolders are not searched: they are other data sets or splits."""
    entries = sorted(entry for entry in Path(path).iterdir() if not entry.name.startswith("."))
    files = [entry.name for entry in entries if is_data(entry.name) and entry.is_file()]
    if not files:
        below = [entry for entry in entries if entry.is_dir() and any(is_data(file.name) for file in entry.iterdir())]
        fix = f"did you mean {' or '.join(map(str, below))}?" if below else f"add {', '.join(DATA_KINDS)} files"
        raise InputError(Fault(path, "has no data file", fix, code="SF-DATA-EMPTY"))
    return choose_files(path, files, "", None, split), len(files) > 1


def _open_described(spec: SourceSpec, entries: Mapping[str, Mapping[str, Any]]) -> tuple[Source, ...]:
    """Open an entry of the folder's dataset_info.json. Settings of the spec override those of the entry."""
    if spec.name is None:
        fix = f"set name to one of {', '.join(entries)}"
        raise InputError(
            Fault(spec.path, f"has a {DESCRIPTION} with {len(entries)} entries", fix, code="SF-DATA-DESCRIPTION")
        )
    entry = read_entry(entries, spec.name, spec.path)
    _check_kind(entry, spec)
    if spec.format not in ("auto", entry.format, "prompts"):
        what = f"has the format {entry.format}, but the config says {spec.format}"
        raise InputError(Fault(entry.where, what, "remove format, or use the file's path", code="SF-DATA-FORMAT"))
    if entry.hub is not None:
        sources = _open_hub(spec, HubData(entry.hub, entry.subset, entry.split, spec.revision, entry.folder))
    elif (file := inside(Path(spec.path), entry)).is_dir():
        sources = _open_folder(str(file), entry.split)
    else:
        sources = (open_file(file),)
    if entry.sample is not None and len(sources) > 1:
        what = f"num_samples works on one file, but the entry has {len(sources)}"
        raise InputError(Fault(entry.where, what, "remove it and set max_samples in the config", code="SF-DATA-SHARES"))
    columns = spec.columns or entry.columns
    read = ", ".join(columns.values())
    note = f"entry {spec.name!r} of {DESCRIPTION}, " + (
        f"which reads {read}" if columns is entry.columns else "columns of the config"
    )
    return tuple(
        replace(
            source,
            format=entry.format,
            columns=columns,
            only_columns=columns is entry.columns,
            tags=entry.tags,
            **_texts(spec),
            sample=entry.sample,
            folder=Path(spec.path),
            notes=(note, *source.notes),
        )
        for source in sources
    )


def _check_kind(entry: Entry, spec: SourceSpec) -> None:
    """Check that the entry holds the kind of data that the stage needs. Prompts can be read from any entry."""
    if spec.kind in ("prompts", entry.kind) or spec.format == "preference":
        return
    stage = methods_for(entry.kind)
    if spec.kind == "answers":
        what = f"is preference data ({entry.mark}): supervised training would also learn its bad answers"
    else:
        what = f"is data for stage {stage}, but this stage learns from {spec.kind}"
    raise InputError(Fault(entry.where, what, f"use another entry, or choose stage {stage}", code="SF-DATA-FORMAT"))


def _open_hub(spec: SourceSpec, data: HubData) -> tuple[Source, ...]:
    if not spec.streaming:
        return open_hub(data)
    if spec.max_samples is None:
        what = "is streamed, but the number of records to read is not set"
        raise InputError(Fault(spec.path, what, "set max_samples of this source", code="SF-DATA-HUB"))
    return (stream_hub(data, spec.max_samples),)


Learned = Literal["completion", "everything"]


def first_record(spec: SourceSpec) -> dict[str, Any]:
    """Return the source's first record under the format's field names. Raises like `first_row`."""
    return first_row(spec)[1].value


def first_row(spec: SourceSpec) -> tuple[Source, Row]:
    """Return the first file and its first record, under the format's field names. Raises InputError for malformed or
    empty data, EnvironmentFault if the hub cannot be reached."""
    files = files_of(spec)
    if files:
        name = str(files[0])
        kind = file_kind(name)
        require_file(files[0], name)
        with file_faults(name), files[0].open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            whole = kind == ".txt"  # the file is one record
            row = (1, {"text": ""}) if whole else next(records_of(name, kind, file, size), None)
        source = Source(name, kind, "", lambda: iter(()), spec.format, spec.columns, **_texts(spec))
    else:
        source = open_sources(spec)[0]
        row = next(source.read(), None)
    if row is None:
        raise InputError(
            Fault(source.name, "contains no records", "add at least one example to the file", code="SF-DATA-EMPTY")
        )
    line, value = row
    if not isinstance(value, dict):
        what = "record 1 is not an object with named fields"
        raise InputError(Fault(f"{source.name}:{line}", what, code="SF-DATA-ROW"))
    return source, Row(1, line, parse_record(value, source, f"{source.name}:{line}"))


def template_and_labels(record: Mapping[str, Any], kind: Kind) -> tuple[str, Learned]:
    """Return the template and train_on that TRL's trainers use for a record like this: plain texts are used unchanged,
    conversations are formatted with the tokenizer's template; if the record has a prompt, only the completion is
    learned, else every token."""
    prompt, text = record.get("prompt"), record.get("text")
    if kind == "answers":
        texts = isinstance(prompt, str) or (prompt is None and isinstance(text, str))
        return "raw" if texts else OWN, "everything" if prompt is None else "completion"
    better = record.get("chosen")
    if not isinstance(prompt if prompt is not None else better, str):
        return OWN, "completion"
    dialogue = is_open_dialogue(str(prompt)) if prompt is not None else is_dialogue(str(better))
    return "human-assistant" if dialogue else "raw", "completion"
