"""From a record to a conversation: one pure function per layout, and a guess that says what it saw.

A conversation is what templates understand: turns of system, user and assistant, or one text. Nothing is repaired:
a missing field, a null, a number where text belongs, an empty answer or turns out of order are faults of the data,
named with file, line, row and field. A blank system text counts as none.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from surefoot.data.rows import Row, kind_of
from surefoot.errors import Fault, InputError

_SHOWN = 8  # faults listed before the rest is only counted
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class ToolCall:
    """What an assistant asks a tool to do. arguments: a JSON object."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """role: system | user | assistant | tool, or "text" for a text without turns. context: alpaca's `input`, else empty.
    calls: of an assistant turn, whose content may then be empty. learned: False for an answer that the data marks as
    not to be learned."""

    role: str
    content: str
    context: str = ""
    calls: tuple[ToolCall, ...] = ()
    learned: bool = True

    @property
    def text(self) -> str:
        """Content and context as one text, for templates that have no place for the latter."""
        return "\n".join(part for part in (self.content, self.context) if part)


@dataclass(frozen=True)
class Conversation:
    """Turns, and the row (number and line, from 1; 0 = from no file) they were read from. tools: definitions of the
    tools on offer, JSON objects as in the OpenAI format ({"type": "function", "function": {"name", …}})."""

    turns: tuple[Turn, ...]
    number: int = 0
    line: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()


Item = TypeVar("Item", Row, Conversation)
Result = TypeVar("Result")


class RowFault(Exception):
    """What is wrong with one row; the caller knows the file."""

    def __init__(self, what: str, fix: str = ""):
        super().__init__(what)
        self.what, self.fix = what, fix


def recognise(rows: Sequence[Row], name: str) -> tuple[str, str]:
    """The layout of the first record and the reason. name: the file, for the error when none fits."""
    columns = list(rows[0].value)
    for layout, required in _REQUIRED.items():
        if all(field in columns for field in required):
            return layout, f"the first record has {_listed(required)}"
    known = "; ".join(f"{layout}: {_listed(required)}" for layout, required in _REQUIRED.items())
    fields = [field for required in _REQUIRED.values() for field in required]
    near = [(field, match) for field in fields if field not in columns for match in _near(field, columns)]
    hint = f" ({near[0][1]!r} looks like {near[0][0]!r})" if near else ""
    what = f"row 1 has no layout that surefoot knows: it has {_listed(columns)}{hint}"
    raise InputError(Fault(f"{name}:{rows[0].line}", what, f"rename the fields ({known})"))


def convert(rows: Iterable[Row], layout: str, name: str) -> list[Conversation]:
    """All rows as conversations. layout: alpaca | messages | text. InputError lists the faulty rows."""
    read = _READERS[layout]
    return each_row(rows, lambda row: Conversation(read(row.value), row.number, row.line), name)


def each_row(items: Iterable[Item], do: Callable[[Item], Result], name: str) -> list[Result]:
    """`do` for every row of the file `name`. RowFaults become one InputError: the first in full, the rest counted."""
    results, faults = [], []
    for item in items:
        try:
            results.append(do(item))
        except RowFault as fault:
            faults.append(Fault(f"{name}:{item.line}", f"row {item.number}: {fault.what}", fault.fix))
    if len(faults) > _SHOWN:
        faults[_SHOWN:] = [Fault(name, f"{len(faults) - _SHOWN} more faulty rows were seen")]
    if faults:
        raise InputError(faults)
    return results


def unused_fields(rows: Sequence[Row], layout: str) -> tuple[str, ...]:
    """Names of the fields that the layout does not read, in order of appearance."""
    names: dict[str, None] = {}
    for row in rows:
        names |= dict.fromkeys(row.value)
        if layout == "messages":
            names |= {f"messages[].{field}": None for turn in row.value["messages"] for field in turn}
    return tuple(field for field in names if field not in _FIELDS[layout])


def _alpaca(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """{"instruction", "output"} and optionally "input" and "system"."""
    system, context = _optional(record, "system"), _optional(record, "input")
    prompt, answer = _text(record, "instruction"), _filled(record, "output")
    if not prompt.strip() and not context:
        raise RowFault("'instruction' and 'input' are both empty: there is no prompt")
    opening = (Turn("system", system),) if system else ()
    return (*opening, Turn("user", prompt, context), Turn("assistant", answer))


def _messages(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """{"messages": [{"role", "content"}, …]}: a system turn at most first, then user and assistant in turn."""
    messages = _field(record, "messages")
    if not isinstance(messages, list) or not messages:
        raise RowFault(f"'messages' is {kind_of(messages)}, not a list of turns")
    turns = [_message(message, number) for number, message in enumerate(messages, start=1)]
    _check_order(turns)
    blank_system = turns[0].role == "system" and not turns[0].content.strip()
    return tuple(turns[1:] if blank_system else turns)


def _message(message: Any, number: int) -> Turn:
    try:
        if not isinstance(message, dict):
            raise RowFault(f"is {kind_of(message)}, not an object with role and content")
        role = _text(message, "role")
        if role not in _ROLES:
            near = _near(role.lower(), _ROLES)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise RowFault(f"has the unknown role {role!r}{hint}", f"known roles: {_listed(_ROLES)}")
        if "tool_calls" in message:
            raise RowFault("has tool calls, which this version cannot train on")
        return Turn(role, _text(message, "content") if role == "system" else _filled(message, "content"))
    except RowFault as fault:
        raise RowFault(f"turn {number} {fault.what}", fault.fix) from None


def _check_order(turns: Sequence[Turn]) -> None:
    """A system turn at most first, then user and assistant in turn, an answer last. RowFault names the turn."""
    expected = "user"
    for number, turn in enumerate(turns, start=1):
        if turn.role == "system" and number == 1:
            continue
        if turn.role != expected:
            raise RowFault(
                f"turn {number} is {turn.role}, but {expected} was expected",
                "turns are: system (optional), then user and assistant alternating",
            )
        expected = "assistant" if expected == "user" else "user"
    if turns[-1].role != "assistant":
        raise RowFault(f"the last turn is {turns[-1].role}: there is no answer to learn", "end with an assistant turn")


def _text_layout(record: Mapping[str, Any]) -> tuple[Turn, ...]:
    """{"text"}: one text, learned in full."""
    return (Turn("text", _filled(record, "text")),)


def _field(record: Mapping[str, Any], field: str) -> Any:
    if field not in record:
        near = _near(field, record)
        hint = f", {near[0]!r} looks like it" if near else ""
        raise RowFault(f"has no {field!r} (it has {_listed(record)}{hint})", "rename or add the field")
    return record[field]


def _text(record: Mapping[str, Any], field: str) -> str:
    value = _field(record, field)
    if not isinstance(value, str):
        raise RowFault(f"has {kind_of(value)} in {field!r}, where text belongs")
    return value


def _filled(record: Mapping[str, Any], field: str) -> str:
    value = _text(record, field)
    if not value.strip():
        raise RowFault(f"has an empty {field!r}", "remove the row or fill it in")
    return value


def _optional(record: Mapping[str, Any], field: str) -> str:
    """Absent, null and blank all mean: none."""
    if record.get(field) is None:
        return ""
    value = _text(record, field)
    return value if value.strip() else ""


def _near(name: str, candidates: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(candidates), n=1)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names) or "nothing"


_REQUIRED = {"messages": ("messages",), "alpaca": ("instruction", "output"), "text": ("text",)}
_FIELDS = {
    "messages": ("messages", "messages[].role", "messages[].content"),
    "alpaca": ("instruction", "input", "output", "system"),
    "text": ("text",),
}
_READERS: dict[str, Callable[[Mapping[str, Any]], tuple[Turn, ...]]] = {
    "messages": _messages,
    "alpaca": _alpaca,
    "text": _text_layout,
}
