"""What became of another tool's config or command: the surefoot config, and for every word of the original its fate.

Nothing is dropped silently. A word is carried over; changed, with the reason; assumed, where the other tool's default
differs from ours and is therefore written out; or listed as without counterpart, with the reason. A word that the tool
does not know, or whose meaning surefoot cannot give, is an error and no note (`surefoot.system.errors.InputError`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Fate = Literal["carried", "changed", "assumed", "listed"]


@dataclass(frozen=True)
class Note:
    """What became of one word.

    word: as its user knows it, such as "lora_rank: 8" or "--lora_r 32"; an assumed one is the tool's default.
    keys: dotted surefoot keys that it set; none where it is listed.
    why: the end of a sentence; empty only where the word is carried over unchanged.
    where: where it stands, such as "run.yaml:3:1" or the flag; empty for an assumption.
    """

    word: str
    fate: Fate
    keys: tuple[str, ...] = ()
    why: str = ""
    where: str = ""


@dataclass(frozen=True)
class Translation:
    """tool: its name as in the list of dialects. command: what of surefoot runs it, such as "train" or "export".

    config: a surefoot config in plain form, where the command takes one; else empty. arguments: the command's other
    words, after the config. notes: in the order of the original, assumptions last. given: the other tool's arguments
    as read, defaults filled in, for training_args.json. environment: NAME=value that stood before the command.
    resumes: the checkpoint, or the run folder of any, that the words ask to go on from; None where they name none.
    """

    tool: str
    command: str
    config: Mapping[str, Any]
    notes: tuple[Note, ...]
    arguments: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    resumes: str | None = None


def said_keys(found: Translation) -> tuple[str, ...]:
    """The keys that given words decide, and no default of the tool's."""
    return tuple(dict.fromkeys(key for note in found.notes if note.fate != "assumed" for key in note.keys))


def in_processes(found: Translation, count: int, engine: Mapping[str, Any] | None = None) -> Translation:
    """With as many processes as the launcher starts, where it starts several and the tool has not settled it."""
    if count == 1 or found.command != "train" or "parallel" in found.config:
        return found
    return replace(found, config={**found.config, "parallel": {"nproc": count, **(engine or {})}})
