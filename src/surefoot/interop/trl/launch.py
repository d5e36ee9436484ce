"""Translate what `trl VERB` passes on to accelerate: a profile or file, the number of processes, other settings.

    command, notes = launched(words, command, options)

Facts: TRL's trl/cli and trl/accelerate_configs; accelerate's launch command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.interop import launchers
from surefoot.interop.faults import setting_error
from surefoot.interop.launch import Command, Options, started
from surefoot.interop.settings import Row
from surefoot.interop.translation import Note
from surefoot.interop.words import Word

_PROFILE = "accelerate_config"
# TRL's own accelerate profiles: how they shard. Each asks for eight processes in bf16.
_EIGHT = {"num_processes": 8, "mixed_precision": "bf16"}
_PROFILES: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"distributed_type": "NO"},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "fsdp1": {"distributed_type": "FSDP"},
    "fsdp2": {"distributed_type": "FSDP"},
    "zero1": {"distributed_type": "DEEPSPEED", "zero_stage": 1},
    "zero2": {"distributed_type": "DEEPSPEED", "zero_stage": 2},
    "zero3": {"distributed_type": "DEEPSPEED", "zero_stage": 3},
}


def starts(word: Word, rows: Mapping[str, Row]) -> bool:
    """Whether TRL passes a setting on to accelerate."""
    return word.name == _PROFILE or (word.name in launchers.ACCELERATE.with_value and word.name not in rows)


def launched(words: Sequence[Word], command: Command, options: Options) -> tuple[Command, tuple[Note, ...]]:
    """Return the command as accelerate starts it, and a note on each setting. Raises InputError for several machines,
    for an unknown profile, and for what surefoot does not support."""
    settled: dict[str, Any] = {}
    for word in (word for word in words if word.name == _PROFILE):
        path = str(word.value)
        if path in _PROFILES:
            settled |= {**_EIGHT, **_PROFILES[path]}
        elif path.endswith((".yaml", ".yml", ".json")):
            settled |= launchers.read_file(path, options.read(path))[0]
        else:
            raise setting_error(
                word.where, f"TRL has no profile {path}", f"choose from {', '.join(_PROFILES)}, or a file"
            )
    for word in (word for word in words if word.name != _PROFILE):
        launchers.check(word.name, word.value, word.where)
        settled[word.name] = word.value
    command = started(command, launchers.ACCELERATE, settled, command.environment, options)
    facts = {name: value for name, value in command.facts.items() if value not in (None, "no", False)}
    command = replace(command, facts={**facts, "processes": command.processes})
    return command, tuple(_launch_note(word, several=command.processes > 1) for word in words)


def _launch_note(word: Word, *, several: bool) -> Note:
    if word.name not in ("num_processes", _PROFILE):
        return Note(word.shown, "listed", (), launchers.reason_of(word.name), word.where)
    if not several:
        return Note(word.shown, "listed", (), "one process holds everything", word.where)
    return Note(word.shown, "carried", ("parallel.engine", "parallel.nproc"), "", word.where)
