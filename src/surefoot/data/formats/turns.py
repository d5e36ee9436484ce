"""What the formats that list turns have in common: their order, the marks of what is learned, where the system text is.

Order: a system turn at most first; then a user turn, an answer, and so on. An answer may be followed by results of
tools (also several, for calls made at once) and another answer. The last turn is an answer, because what follows it
would teach nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surefoot.data.formats.conversation import Conversation, Turn
from surefoot.data.formats.fields import RowFault, field, listed, near, optional, text
from surefoot.data.formats.pairing import check_results
from surefoot.data.formats.tools import read_tools
from surefoot.data.rows import kind_of

_FIRST = ("user",)
_NEXT = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}


def role_in(turn: Mapping[str, Any], name: str, roles: Mapping[str, str]) -> str:
    """What the turn's field `name` stands for. roles: word -> role. RowFault for any other word."""
    written = text(turn, name)
    if written not in roles:
        like = near(written.lower(), roles)
        hint = f"; did you mean {like[0]!r}?" if like else ""
        raise RowFault(f"has the unknown role {written!r}{hint}", f"known roles: {listed(roles)}")
    return roles[written]


def read_dialogue(record: Mapping[str, Any], name: str, read_turn: Callable[[Mapping[str, Any]], Turn]) -> Conversation:
    """The conversation in the list `name`, with the record's `system` and `tools` where it has them. RowFaults name the
    turn, counted from 1."""
    turns = read_turns(record, name, read_turn)
    check_order(turns)
    system = optional(record, "system")
    if turns[0].role == "system":
        if system and turns[0].content.strip():
            raise RowFault("has a 'system' field and a system turn", "keep one of them")
        system, turns = system or turns[0].content, turns[1:]
    if not any(turn.learned for turn in turns if turn.role == "assistant"):
        raise RowFault("marks every answer as not to be learned", "remove the row, or mark one with train: true")
    opening = (Turn("system", system),) if system.strip() else ()
    return Conversation((*opening, *turns), tools=read_tools(record))


def read_turns(record: Mapping[str, Any], name: str, read_turn: Callable[[Mapping[str, Any]], Turn]) -> list[Turn]:
    """Every item of the list as a turn, in whatever order."""
    items = field(record, name)
    if not isinstance(items, list) or not items:
        raise RowFault(f"{name!r} is {kind_of(items)}, not a list of turns")
    turns = []
    for number, item in enumerate(items, start=1):
        try:
            if not isinstance(item, dict):
                raise RowFault(f"is {kind_of(item)}, not an object with role and content")
            turns.append(read_turn(item))
        except RowFault as fault:
            raise RowFault(f"turn {number} {fault.what}", fault.fix) from None
    return turns


def check_order(turns: Sequence[Turn], *, answered: bool = True) -> None:
    """RowFault, with the number of the first turn that stands where it cannot, or of a result without its call.
    answered: the last turn has to be an answer."""
    expected = _FIRST
    for number, turn in enumerate(turns, start=1):
        if turn.role not in expected and not (turn.role == "system" and number == 1):
            raise RowFault(
                f"turn {number} is {turn.role}, but {' or '.join(expected)} was expected",
                "turns are: system (optional), then user and assistant alternating, tool results after an answer",
            )
        expected = _NEXT[turn.role]
    if answered and turns[-1].role != "assistant":
        raise RowFault(
            f"the last turn is {turns[-1].role}: there is no answer to learn",
            "end with an assistant turn, or leave out what follows the last one",
        )
    check_results(turns)


def is_learned(item: Mapping[str, Any], role: str) -> bool:
    """What `train: true/false` or `weight: 0/1` say; True where neither is given."""
    marks = []
    if (train := item.get("train")) is not None:
        if not isinstance(train, bool):
            raise RowFault(f"has {kind_of(train)} in 'train', where true or false belongs")
        marks.append(train)
    if (weight := item.get("weight")) is not None:
        if isinstance(weight, bool) or weight not in (0, 1):
            raise RowFault("has a 'weight' that is neither 0 nor 1", "1: the answer is learned; 0: it is not")
        marks.append(weight == 1)
    if True in marks and role != "assistant":
        raise RowFault(f"asks to learn a {role} turn", "only answers are learned; see data.train_on")
    if len(set(marks)) == 2:
        raise RowFault("has 'train' and 'weight' that contradict each other", "keep one of them")
    return False not in marks
