"""The `sharegpt` format: {"conversations": [{"from", "value"}, …]}, with tools in roles of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.data.formats.conversation import Conversation, Turn
from surefoot.data.formats.fields import field, filled, text
from surefoot.data.formats.pairing import read_result
from surefoot.data.formats.tools import read_calls
from surefoot.data.formats.turns import is_learned, read_dialogue, role_in

_CALL = "call"
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "system": "system",
    "function_call": _CALL,
    "observation": "tool",
    "user": "user",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool_call": _CALL,
    "tool": "tool",
    "tool_response": "tool",
}


def read_sharegpt(record: Mapping[str, Any]) -> Conversation:
    """{"conversations": [{"from", "value"}, …]}, optionally with "tools" and "system". `messages` is read as well,
    where there is no `conversations`."""
    name = "messages" if "conversations" not in record and "messages" in record else "conversations"
    return read_dialogue(record, name, read_sharegpt_turn)


def read_sharegpt_turn(item: Mapping[str, Any]) -> Turn:
    """{"from", "value"} as one turn."""
    role = role_in(item, "from", _SHAREGPT_ROLES)
    if role == _CALL:
        calls = read_calls(field(item, "value"), "value")
        return Turn("assistant", "", calls=calls, learned=is_learned(item, "assistant"))
    content = text(item, "value") if role in ("system", "tool") else filled(item, "value")
    call, tool = read_result(item) if role == "tool" else ("", "")
    return Turn(role, content, learned=is_learned(item, role), call=call, tool=tool)
