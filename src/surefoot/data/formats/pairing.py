"""Which call a tool's result belongs to: the one whose id it names, or, where no result of an answer names one, the
call in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefoot.data.formats.conversation import Turn
from surefoot.data.formats.fields import RowFault, optional

_FIX = "each result names the id of one call of the answer before it"


def pair_results(turns: Sequence[Turn]) -> list[int | None]:
    """For each turn the place, among the calls of the answer before it, of the call that it is the result of. None
    where there is no such call, and for turns that are no results."""
    found: list[int | None] = [None] * len(turns)
    for answer, results in _rounds(turns):
        ids = [call.id for call in turns[answer].calls]
        named = any(turns[place].call for place in results)
        for number, place in enumerate(results):
            if named:
                own = turns[place].call
                found[place] = ids.index(own) if own in ids else None
            elif number < len(ids):
                found[place] = number
    return found


def check_results(turns: Sequence[Turn]) -> None:
    """RowFault for results that leave open which calls they belong to."""
    paired = pair_results(turns)
    for answer, results in _rounds(turns):
        ids = [call.id for call in turns[answer].calls if call.id]
        if len(set(ids)) < len(ids):
            raise RowFault(f"turn {answer + 1} has two calls with one id", "give every call an id of its own")
        named = [turns[place].call for place in results]
        for place in results if any(named) else ():
            own, where = turns[place].call, f"turn {place + 1}"
            if not own:
                raise RowFault(f"{where} names no call, and another result of the same answer does", _FIX)
            if own not in ids:
                raise RowFault(f"{where} is the result of a call {own!r}, which turn {answer + 1} does not make", _FIX)
            if named.count(own) > 1:
                raise RowFault(f"the call {own!r} of turn {answer + 1} has two results", _FIX)
        for place in () if any(named) else results:
            call, tool = paired[place], turns[place].tool
            if call is not None and tool and tool != (other := turns[answer].calls[call].name):
                what = f"turn {place + 1} is a result of {tool!r}, and the call in its place is to {other!r}"
                raise RowFault(what, "put results in the order of their calls, or name the calls in tool_call_id")


def read_result(item: Mapping[str, Any]) -> tuple[str, str]:
    """`tool_call_id` and `name` of a result, "" where it has none."""
    return optional(item, "tool_call_id"), optional(item, "name")


def _rounds(turns: Sequence[Turn]) -> Iterator[tuple[int, list[int]]]:
    """The place of each answer, and those of the results that follow it."""
    for answer, turn in enumerate(turns):
        if turn.role == "assistant":
            end = answer + 1
            while end < len(turns) and turns[end].role == "tool":
                end += 1
            yield answer, list(range(answer + 1, end))
