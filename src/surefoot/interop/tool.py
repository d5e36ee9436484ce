"""Lines that users of another tool search a log for, said beside surefoot's own.

A voice makes them from facts of the run and says nothing that the run did not do: where the other tool's line would
not be true here, it is left out or worded truly.

How a dialect presents itself: which commands and files are its own, and how they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import Row
from surefoot.interop.translation import Note, Translation


@dataclass(frozen=True)
class RunFacts:
    """A run that is set up. embedding: name of the token embedding among the model's modules. bos: id that stands
    before every example, None for none. pad, pad_id, added_rows: the PAD. base, compute: types. attention: the
    implementation. device: "cpu" or "cuda". ids, learned: the first training example and which of its tokens carry
    loss; text, answer: decoded.
    """

    config: RunConfig
    embedding: str
    bos: int | None
    pad: str
    pad_id: int
    added_rows: int
    base: str
    compute: str
    attention: str
    device: str
    ids: tuple[int, ...]
    learned: tuple[bool, ...]
    text: str
    answer: str


@dataclass(frozen=True)
class End:
    """folder, files: of the run. results: what all_results.json holds."""

    folder: str
    files: frozenset[str]
    results: Mapping[str, Any]


Lines = Sequence[str]


@dataclass(frozen=True)
class Voice:
    """started: before anything is loaded. ready: before step 1. row: on every row of trainer_log.jsonl. finished: once
    the outcome is published; not after a stop."""

    started: Callable[[], Lines] = lambda: ()
    ready: Callable[[RunFacts], Lines] = lambda facts: ()
    row: Callable[[Mapping[str, Any]], Lines] = lambda row: ()
    finished: Callable[[End], Lines] = lambda end: ()


SILENT = Voice()


def silent(translation: Translation) -> Voice:
    return SILENT


@dataclass(frozen=True)
class Tool:
    """claims_command, claims_file(path, text): whether it is this tool's. from_file(path, text, overrides, options).
    environment_note: what it says of a NAME=value or a launcher's word. voice: the lines
    that its users search a log for. rows: its flags, for --help; none where it takes a file."""

    name: str
    claims_command: Callable[[Command], bool]
    from_command: Callable[[Command, Options], Translation]
    claims_file: Callable[[str, str], bool] = lambda path, text: False
    from_file: Callable[[str, str, Sequence[str], Options], Translation] | None = None
    environment_note: Callable[[Note], Note] = lambda note: note
    voice: Callable[[Translation], Voice] = silent
    rows: Mapping[str, Row] = field(default_factory=dict)
