"""Define a tool: which commands and files belong to it, and how they are translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.interop.backward import Ours
from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import Row
from surefoot.interop.tool_log import NO_LINES, ToolLog
from surefoot.interop.translation import Note, Translation

Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Target:
    """How surefoot's configs are written for a tool, see `surefoot.interop.export`.

    name: as in its dialect. file: name of the config.
    rows: config -> rows of each of the tool's methods that may fit; the one that keeps most is written.
    start: (config, method, path of what is written) -> the words that start the training.
    fixed: config -> settings that the tool demands, whatever they mean here.
    always: settings that are written also at the tool's default, as it demands them.
    files: config -> name and text of the files beside it.
    origin: (config, a translated source) -> the source that was written for it.
    remarks: key -> why it may differ, where no note says so.
    """

    name: str
    file: str
    rows: Callable[[Ours], Mapping[str, Rows]]
    start: Callable[[Ours, str, str], list[str]]
    fixed: Callable[[Ours], Mapping[str, Any]] = lambda ours: {}
    always: tuple[str, ...] = ()
    files: Callable[[Ours], Mapping[str, str]] = lambda ours: {}
    origin: Callable[[Ours, dict[str, Any]], dict[str, Any]] = lambda ours, source: source
    remarks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Tool:
    """One tool whose settings are translated.

    claims_command, claims_file(path, text): whether a command or file belongs to this tool.
    from_command, from_file(path, text, overrides, options): translate it; raise InputError with every fault.
    environment_note: adjusts the note on a NAME=value or a launcher's flag to what this tool does with it.
    log: the log lines that its users search for.
    rows: its flags, for --help; empty if it takes a file.
    target: how a config is written for it; None if it is not.
    """

    name: str
    claims_command: Callable[[Command], bool]
    from_command: Callable[[Command, Options], Translation]
    claims_file: Callable[[str, str], bool] = lambda path, text: False
    from_file: Callable[[str, str, Sequence[str], Options], Translation] | None = None
    environment_note: Callable[[Note], Note] = lambda note: note
    log: Callable[[Translation], ToolLog] = lambda translation: NO_LINES
    rows: Rows = field(default_factory=dict)
    target: Target | None = None
