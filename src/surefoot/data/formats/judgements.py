"""The `judged` format: an answer that somebody called good or bad, as KTO learns from.

TRL has `prompt`, `completion` and `label`; LLaMA-Factory a dialogue in `messages` or `conversations`, or an alpaca
record, with a column that its description calls `kto_tag`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot.data.formats.conversation import Conversation, Turn
from surefoot.data.formats.fields import RowFault, listed, text
from surefoot.data.formats.openings import answer_turn, opening_field, opening_form, read_opening, read_turn
from surefoot.data.formats.tools import read_tools
from surefoot.data.formats.turns import check_order, read_turns
from surefoot.data.rows import kind_of

MARKS = ("label", "kto_tag")
ANSWERS = ("completion", "output")  # fields beside a prompt; in a list of turns the last one is the answer


def mark_field(record: Mapping[str, Any]) -> str | None:
    return next((name for name in MARKS if name in record), None)


def read_judged(record: Mapping[str, Any]) -> Conversation:
    """A conversation of which only what is judged is learned: the completion, or else the last answer."""
    mark = mark_field(record)
    if mark is None:
        raise RowFault(f"has no {listed(MARKS)} (it has {listed(record)})", "mark every answer with true or false")
    good = record[mark]
    if good not in (0, 1) or not isinstance(good, bool | int):
        raise RowFault(f"has {kind_of(good)} in {mark!r}, where true or false belongs")
    prompt, answer = read_opening(record), _judged_answer(record)
    if answer is None:
        if prompt[-1].role != "assistant":
            raise RowFault("has no answer that could be judged", "end with an assistant turn, or add 'completion'")
        prompt, answer = prompt[:-1], prompt[-1:]
    if answer[0].role != "assistant":
        raise RowFault(f"turn 1 of the answer is {answer[0].role}, but assistant was expected")
    check_order([*prompt, *answer])
    turns = (*(replace(turn, learned=False) for turn in prompt), *(replace(turn, learned=True) for turn in answer))
    return Conversation(turns, tools=read_tools(record), good=bool(good))


def judged_form(record: Mapping[str, Any]) -> str:
    return f"the prompt is {opening_form(record)}, {mark_field(record)!r} judges"


def _judged_answer(record: Mapping[str, Any]) -> list[Turn] | None:
    """None where the prompt's list holds it."""
    field = opening_field(record)
    name = next((name for name in ANSWERS if record.get(name) is not None), None)
    if field in ("conversations", "messages") or name is None:
        return None
    if isinstance(record[name], list):
        return read_turns(record, name, read_turn)
    return [answer_turn(record, text(record, name))]
