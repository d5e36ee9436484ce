"""How a dialect presents itself: which commands and files are its own, and how they are read."""

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

    claims_command, claims_file(path, text): whether it is this tool's.
    from_command, from_file(path, text, overrides, options): read it; InputError with every fault.
    environment_note: the note on a NAME=value or a launcher's word, as this tool takes it.
    log: the lines that its users search a log for.
    rows: its flags, for --help; none where it takes a file.
    """

    name: str
    claims_command: Callable[[Command], bool]
    from_command: Callable[[Command, Options], Translation]
    claims_file: Callable[[str, str], bool] = lambda path, text: False
    from_file: Callable[[str, str, Sequence[str], Options], Translation] | None = None
    environment_note: Callable[[Note], Note] = lambda note: note
    log: Callable[[Translation], ToolLog] = lambda translation: NO_LINES
    rows: Mapping[str, Row] = field(default_factory=dict)
