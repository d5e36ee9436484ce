"""Define a tool: which commands and files belong to it, and how they are translated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from surefoot.interop.launch import Command, Options
from surefoot.interop.settings import Row
from surefoot.interop.tool_log import NO_LINES, ToolLog
from surefoot.interop.translation import Note, Translation


@dataclass(frozen=True)
class Tool:
    """One tool whose settings are translated.

    claims_command, claims_file(path, text): whether a command or file belongs to this tool.
    from_command, from_file(path, text, overrides, options): translate it; raise InputError with every fault.
    environment_note: adjusts the note on a NAME=value or a launcher's flag to what this tool does with it.
    log: the log lines that its users search for.
    rows: its flags, for --help; empty if it takes a file.
    """

    name: str
    claims_command: Callable[[Command], bool]
    from_command: Callable[[Command, Options], Translation]
    claims_file: Callable[[str, str], bool] = lambda path, text: False
    from_file: Callable[[str, str, Sequence[str], Options], Translation] | None = None
    environment_note: Callable[[Note], Note] = lambda note: note
    log: Callable[[Translation], ToolLog] = lambda translation: NO_LINES
    rows: Mapping[str, Row] = field(default_factory=dict)
