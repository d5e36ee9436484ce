"""A conversation as the messages that chat templates expect: transformers' (and OpenAI's) shape.

Calls get ids, because some templates (Mistral's) print them: nine digits that count the calls of the conversation, so
the same data always gives the same text, whatever ids it has. A tool's answer carries the id of the call that it
answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.data.formats import Turn
from surefoot.data.formats.pairing import pair_results


def call_ids(turns: Sequence[Turn]) -> list[tuple[str, ...]]:
    """For each turn the ids of its calls, or the one id that a tool's answer belongs to ("" where there is no call)."""
    found: list[tuple[str, ...]] = []
    count, latest = 0, ()
    for turn, call in zip(turns, pair_results(turns), strict=True):
        if turn.role == "tool":
            found.append(("" if call is None else latest[call],))
            continue
        latest = tuple(f"{count + number:09d}" for number in range(len(turn.calls)))
        count += len(latest)
        found.append(latest)
    return found


def messages(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One message per turn. `tool_calls` stands only where there are calls: templates ask whether it is defined."""
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for turn, ids in zip(turns, call_ids(turns), strict=True):
        message: dict[str, Any] = {"role": turn.role, "content": turn.text}
        if turn.calls:
            message["tool_calls"] = [
                {"type": "function", "id": own, "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for own, call in zip(ids, turn.calls, strict=True)
            ]
            names |= {own: call.name for own, call in zip(ids, turn.calls, strict=True)}
        if turn.role == "tool" and ids[0]:
            message |= {"tool_call_id": ids[0], "name": names[ids[0]]}
        made.append(message)
    return made
