"""The `messages` format: {"messages": [{"role", "content"}, …]} as in the OpenAI API, with tools and calls.

Also TRL's prompt-completion records, whose two halves are texts or lists of such messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot.data.formats.conversation import Conversation, Turn
from surefoot.data.formats.fields import RowFault, field, filled, text
from surefoot.data.formats.pairing import read_result
from surefoot.data.formats.tools import read_calls, read_tools
from surefoot.data.formats.turns import check_order, is_learned, read_dialogue, read_turns, role_in
from surefoot.data.rows import kind_of

_MESSAGE_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def read_messages(record: Mapping[str, Any]) -> Conversation:
    """{"messages": [{"role", "content"}, …]}, optionally with "tools" and "system". `conversations` is read as well,
    where there is no `messages`."""
    name = "conversations" if "messages" not in record and "conversations" in record else "messages"
    return read_dialogue(record, name, read_message)


def read_prompt_completion(record: Mapping[str, Any]) -> Conversation:
    """{"prompt", "completion"}: two texts, or two lists of messages. The completion is learned, the prompt never."""
    if isinstance(field(record, "prompt"), str):
        return Conversation((Turn("user", filled(record, "prompt")), Turn("assistant", filled(record, "completion"))))
    prompt = [replace(turn, learned=False) for turn in read_turns(record, "prompt", read_message)]
    completion = read_turns(record, "completion", read_message)
    check_order([*prompt, *completion])
    if completion[0].role != "assistant":
        raise RowFault(f"turn 1 of 'completion' is {completion[0].role}, but assistant was expected")
    return Conversation((*prompt, *completion), tools=read_tools(record))


def read_message(message: Mapping[str, Any]) -> Turn:
    """{"role", "content"} as one turn."""
    role = role_in(message, "role", _MESSAGE_ROLES)
    calls = read_calls(message["tool_calls"], "tool_calls") if message.get("tool_calls") else ()
    if calls and role != "assistant":
        raise RowFault(f"has tool calls, but its role is {message['role']}", "calls are made by the assistant")
    may_be_empty = calls or role in ("system", "tool")
    content = "" if calls and message.get("content") is None else _content(message)
    if not content.strip() and not may_be_empty:
        raise RowFault("has an empty 'content'", "remove the row or fill it in")
    call, tool = read_result(message) if role == "tool" else ("", "")
    return Turn(role, content, calls=calls, learned=is_learned(message, role), call=call, tool=tool)


def _content(message: Mapping[str, Any]) -> str:
    """A text, or a list of parts that are all text."""
    parts = field(message, "content")
    if not isinstance(parts, list):
        return text(message, "content")
    for number, part in enumerate(parts, start=1):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise RowFault(f"has a part {number} in 'content' that is no text ({kind})", "only texts can be learned")
    return "".join(part["text"] for part in parts)
