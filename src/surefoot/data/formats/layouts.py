"""The formats as rows of a table: the fields each needs, those it reads besides, and the function for it.

`auto` takes the first row whose needed fields the first record has, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.data.formats.alpaca import read_alpaca, read_commonsense
from surefoot.data.formats.conversation import Conversation, Turn
from surefoot.data.formats.fields import RowFault, each_row, filled, listed, near
from surefoot.data.formats.messages import read_messages, read_prompt_completion
from surefoot.data.formats.sharegpt import read_sharegpt
from surefoot.data.rows import Row
from surefoot.errors import Fault, InputError

_DIALOGUES = ("messages", "conversations")  # fields that may hold a list of turns
_MARKS = ("train", "weight")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Layout:
    """needed, besides: fields of a record. turn_key: what every turn of a format with turns has; turn_fields: all that
    is read of one, or is of no consequence for what is learned."""

    read: Callable[[Record], Conversation]
    needed: tuple[str, ...]
    besides: tuple[str, ...] = ()
    turn_key: str = ""
    turn_fields: tuple[str, ...] = ()

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.needed, *self.besides)

    def fits(self, record: Record) -> bool:
        if not self.turn_key:
            return all(name in record for name in self.needed)
        turns = record.get(_dialogue(record))
        return isinstance(turns, list) and bool(turns) and isinstance(turns[0], dict) and self.turn_key in turns[0]

    def seen_in(self, record: Record) -> str:
        """What made the record fit, for a sentence."""
        if self.turn_key:
            return f"{_dialogue(record)!r}, whose turns have {self.turn_key!r}"
        return listed(self.needed)


def _read_text(record: Record) -> Conversation:
    """{"text"}: one text, learned in full."""
    return Conversation((Turn("text", filled(record, "text")),))


def _dialogue(record: Record) -> str:
    return next((name for name in _DIALOGUES if name in record), _DIALOGUES[0])


_ALPACA = ("input", "system", "history")
LAYOUTS: Mapping[str, Layout] = {
    "messages": Layout(
        read_messages,
        ("messages",),
        ("conversations", "tools", "system"),
        "role",
        ("role", "content", "tool_calls", "tool_call_id", "name", *_MARKS),
    ),
    "sharegpt": Layout(
        read_sharegpt,
        ("conversations",),
        ("messages", "tools", "system"),
        "from",
        ("from", "value", "tool_call_id", "name", *_MARKS),
    ),
    "commonsense": Layout(read_commonsense, ("instruction", "output", "answer"), _ALPACA),
    "alpaca": Layout(read_alpaca, ("instruction", "output"), _ALPACA),
    "prompt-completion": Layout(read_prompt_completion, ("prompt", "completion"), ("tools",)),
    "text": Layout(_read_text, ("text",)),
}


def recognise(rows: Sequence[Row], name: str, *, among: Sequence[str] = tuple(LAYOUTS)) -> tuple[str, str]:
    """The layout of the first record and the reason. name: the file, for the error when none of `among` fits."""
    first = rows[0].value
    for layout in among:
        if LAYOUTS[layout].fits(first):
            besides = [field for field in LAYOUTS[layout].besides if first.get(field) and field not in _DIALOGUES]
            more = f", and {listed(besides)} besides" if besides else ""
            return layout, f"the first record has {LAYOUTS[layout].seen_in(first)}{more}"
    columns = list(first)
    known = "; ".join(f"{layout}: {listed(LAYOUTS[layout].needed)}" for layout in among)
    fields = [field for layout in among for field in LAYOUTS[layout].needed]
    like = [(field, match) for field in fields if field not in columns for match in near(field, columns)]
    hint = f" ({like[0][1]!r} looks like {like[0][0]!r})" if like else ""
    what = f"row 1 has no layout that surefoot knows: it has {listed(columns)}{hint}"
    fix = f"rename the fields, or name them in the source's columns ({known})"
    raise InputError(Fault(f"{name}:{rows[0].line}", what, fix))


def convert(rows: Iterable[Row], layout: str, name: str) -> list[Conversation]:
    """All rows as conversations. layout: a key of LAYOUTS. InputError lists the faulty rows."""
    read = LAYOUTS[layout].read
    return each_row(rows, lambda row: replace(read(row.value), number=row.number, line=row.line), name)


def convert_with(read_record: Callable[[dict[str, Any]], Any], rows: Iterable[Row], name: str) -> list[Conversation]:
    """All rows through a user's function. It gets a record and returns its text, its list of messages, or
    {"messages": …, "tools": …}; all rules of the messages format hold. InputError lists the rows that fail."""
    return each_row(rows, lambda row: replace(_custom(read_record, row.value), number=row.number, line=row.line), name)


def _custom(read_record: Callable[[dict[str, Any]], Any], record: Record) -> Conversation:
    try:
        found = read_record(dict(record))
    except Exception as error:  # the user's own code: whatever it raises belongs to this row
        raise RowFault(f"the function that reads records failed: {type(error).__name__}: {error}") from error
    if isinstance(found, str):
        return _read_text({"text": found})
    if isinstance(found, list):
        found = {"messages": found}
    if not isinstance(found, dict):
        what = f"the function that reads records returned {type(found).__name__}"
        raise RowFault(what, "return a text, a list of messages, or {'messages': …, 'tools': …}")
    return read_messages(found)


def unused_fields(rows: Sequence[Row], layout: str) -> tuple[str, ...]:
    """Names of the fields that the layout does not read, in order of appearance."""
    table, names = LAYOUTS[layout], {}
    for row in rows:
        names |= dict.fromkeys(name for name in row.value if name not in table.fields)
        if table.turn_key:
            dialogue = _dialogue(row.value) if table.needed[0] not in row.value else table.needed[0]
            names |= {
                f"{dialogue}[].{name}": None
                for turn in row.value[dialogue]
                for name in turn
                if name not in table.turn_fields
            }
    return tuple(names)
