"""The `prompts` format: what a policy is to answer. Any record that has a prompt has one, whatever follows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.data.formats.conversation import Conversation
from surefoot.data.formats.fields import RowFault
from surefoot.data.formats.openings import opening_field, opening_form, read_opening
from surefoot.data.formats.ranking import PAIR, form_of, read_ranked
from surefoot.data.formats.tools import read_tools
from surefoot.data.formats.turns import check_order


def read_prompt(record: Mapping[str, Any]) -> Conversation:
    """A conversation that ends where the model begins to write: a preference record's prompt; else that of the record,
    without its last answer."""
    if all(name in record for name in PAIR):
        ranked = read_ranked(record)
        return Conversation(ranked.prompt, tools=ranked.tools)
    turns = read_opening(record)
    check_order(turns, answered=False)
    if turns[-1].role == "assistant":
        turns = turns[:-1]
    if not turns or turns[-1].role not in ("user", "tool"):
        raise RowFault("has nothing that a model could answer", "a prompt ends with a user turn")
    return Conversation(tuple(turns), tools=read_tools(record))


def prompt_form(record: Mapping[str, Any]) -> str:
    if all(name in record for name in PAIR):
        return f"preference records: {form_of(record)}"
    name = opening_field(record)
    listed = name is not None and isinstance(record[name], list)
    return f"the prompt is {opening_form(record)}" + (", without the last answer" if listed else "")
