"""What stands before an answer, in whichever of the usual fields a record has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.data.formats.alpaca import read_instruction
from surefoot.data.formats.conversation import Turn
from surefoot.data.formats.dialogue_text import is_open_dialogue, read_opening_text
from surefoot.data.formats.fields import RowFault, filled, listed, optional
from surefoot.data.formats.messages import read_message
from surefoot.data.formats.sharegpt import read_sharegpt_turn
from surefoot.data.formats.turns import read_turns

OPENINGS = ("prompt", "conversations", "messages", "instruction")  # fields, the first of which is read
BESIDES = ("input", "history", "system", "tools")


def read_turn(item: Mapping[str, Any]) -> Turn:
    """A turn with `role` and `content`, or with `from` and `value`."""
    return read_sharegpt_turn(item) if "from" in item and "role" not in item else read_message(item)


def opening_field(record: Mapping[str, Any]) -> str | None:
    """Where the prompt stands; null counts as absent, since tables have no other way to leave a field out."""
    return next((name for name in OPENINGS if record.get(name) is not None), None)


def read_opening(record: Mapping[str, Any]) -> list[Turn]:
    """The turns of the first field of OPENINGS that the record has, after the text in `system`. RowFault without any.
    A list may end with an answer."""
    name = opening_field(record)
    if name is None:
        raise RowFault(f"has no prompt (it has {listed(record)})", f"the prompt stands in {listed(OPENINGS)}")
    if name == "instruction":
        return list(read_instruction(record))
    value = record[name]
    turns = read_opening_text(filled(record, name), name) if isinstance(value, str) else _listed(record, name)
    system = optional(record, "system")
    if turns[0].role == "system":
        if system and turns[0].content.strip():
            raise RowFault("has a 'system' field and a system turn", "keep one of them")
        system, turns = system or turns[0].content, turns[1:]
    return [*([Turn("system", system)] if system.strip() else []), *turns]


def answer_turn(record: Mapping[str, Any], words: str) -> Turn:
    """A text that answers the record's prompt. Behind `Assistant:` it begins with a blank, which is no part of it."""
    prompt = record.get("prompt")
    return Turn("assistant", words.strip() if isinstance(prompt, str) and is_open_dialogue(prompt) else words)


def opening_form(record: Mapping[str, Any]) -> str:
    """How the prompt is written, in words for the audit."""
    name = opening_field(record)
    if name is None or name == "instruction" or not isinstance(record[name], str):
        return {None: "no prompt", "instruction": "an instruction"}.get(name, f"turns in {name!r}")
    return "a Human/Assistant dialogue in 'prompt', read as turns" if is_open_dialogue(record[name]) else "a text"


def _listed(record: Mapping[str, Any], name: str) -> Sequence[Turn]:
    return read_turns(record, name, read_turn)
