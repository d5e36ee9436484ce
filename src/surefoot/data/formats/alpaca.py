"""Formats whose fields are texts: alpaca with history, and the commonsense records of LLM-Adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.data.formats.conversation import Conversation, Turn
from surefoot.data.formats.fields import RowFault, field, filled, optional, text
from surefoot.data.rows import kind_of


def read_alpaca(record: Mapping[str, Any]) -> Conversation:
    """{"instruction", "output"} and optionally "input", "system" and "history": [[prompt, answer], …] of the turns
    before, whose answers are learned as well."""
    opening = read_instruction(record)
    return Conversation((*opening, Turn("assistant", filled(record, "output"))))


def read_instruction(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """All of an alpaca record that stands before its answer."""
    system, context = optional(record, "system"), optional(record, "input")
    prompt = text(record, "instruction")
    if not prompt.strip() and not context:
        raise RowFault("'instruction' and 'input' are both empty: there is no prompt")
    opening = (Turn("system", system),) if system else ()
    return (*opening, *_history(record), Turn("user", prompt, context))


def read_commonsense(record: Mapping[str, Any]) -> Conversation:
    """An alpaca record with "answer", the short form of "output": text or a number. Training reads the output alone;
    evaluation compares with the answer."""
    answer = field(record, "answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise RowFault(f"has {kind_of(answer)} in 'answer', where text or a number belongs")
    return read_alpaca(record)


def _history(record: Mapping[str, Any]) -> list[Turn]:
    pairs = record.get("history")
    if pairs is None:
        return []
    if not isinstance(pairs, list):
        raise RowFault(f"'history' is {kind_of(pairs)}, not a list of [prompt, answer]")
    turns = []
    for number, pair in enumerate(pairs, start=1):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(part, str) for part in pair):
            raise RowFault(f"pair {number} of 'history' is not [prompt, answer], two texts")
        if not all(part.strip() for part in pair):
            raise RowFault(f"pair {number} of 'history' holds an empty text", "remove the pair or fill it in")
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1])]
    return turns
