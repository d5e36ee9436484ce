"""The table of record formats: the fields that each needs and reads, and its reader; and readers of the user's own.

`format: auto` takes the first row of the table whose needed fields the first record has, and says so. `reader_with`
turns a user's function into a reader to which the same rules apply.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.formats.conversation import Conversation, RowFault, Turn, each_row, filled, listed
from surefoot.data.formats.preference import (
    ANSWERS,
    BESIDES,
    MARKS,
    OPENINGS,
    PAIR,
    form_of,
    judged_form,
    prompt_form,
    read_judged,
    read_preference,
    read_prompt,
)
from surefoot.data.formats.supervised import (
    read_alpaca,
    read_commonsense,
    read_messages,
    read_prompt_completion,
    read_sharegpt,
)
from surefoot.data.sources.records import Kind, Row
from surefoot.method_facts.losses import joined
from surefoot.method_facts.methods import FORMATS
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import nearest_words

_DIALOGUES = ("messages", "conversations")  # fields that may hold a list of turns
_MARKS = ("train", "weight")
Record = Mapping[str, Any]
Reader = Callable[[Record], Conversation | tuple[Conversation, ...]]


@dataclass(frozen=True)
class Layout:
    """One format of records: how it is known, and what reads it.

    read: the record's conversation, or of a pair both.
    needed, besides: fields of a record.
    turn_key: what every turn of a format with turns has.
    turn_fields: all that is read of one, or is of no consequence for what is learned.
    form: in which of several ways a record is written, in words for the audit.
    """

    read: Reader
    needed: tuple[str, ...]
    besides: tuple[str, ...] = ()
    turn_key: str = ""
    turn_fields: tuple[str, ...] = ()
    form: Callable[[Record], str] | None = None

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


def read_text(record: Record) -> Conversation:
    """{"text"}: one text, learned in full."""
    return Conversation((Turn("text", filled(record, "text")),))


def _dialogue(record: Record) -> str:
    return next((name for name in _DIALOGUES if name in record), _DIALOGUES[0])


_ALPACA = ("input", "system", "history")
LAYOUTS: Mapping[str, Layout] = joined(
    FORMATS,
    {
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
        "text": Layout(read_text, ("text",)),
        "preference": Layout(read_preference, PAIR, (*OPENINGS, *BESIDES), form=form_of),
        "judged": Layout(read_judged, (), (*MARKS, *OPENINGS, *BESIDES, *ANSWERS), form=judged_form),
        "prompts": Layout(read_prompt, (), (*OPENINGS, *BESIDES, *ANSWERS, *PAIR), form=prompt_form),
    },
)
FOR_ANSWERS = tuple(name for name in LAYOUTS if FORMATS[name] == "answers")


def recognise(row: Row, name: str, *, among: Sequence[str] = FOR_ANSWERS) -> tuple[str, str]:
    """The layout of the first record and the reason. name: the file, for the error when none of `among` fits."""
    first = row.value
    for layout in among:
        if LAYOUTS[layout].fits(first):
            besides = [field for field in LAYOUTS[layout].besides if first.get(field) and field not in _DIALOGUES]
            more = f", and {listed(besides)} besides" if besides else ""
            return layout, f"the first record has {LAYOUTS[layout].seen_in(first)}{more}"
    columns = list(first)
    known = "; ".join(f"{layout}: {listed(LAYOUTS[layout].needed)}" for layout in among)
    fields = [field for layout in among for field in LAYOUTS[layout].needed]
    like = [(field, match) for field in fields if field not in columns for match in nearest_words(field, columns, 1)]
    hint = f" ({like[0][1]!r} looks like {like[0][0]!r})" if like else ""
    what = f"row 1 has no layout that surefoot knows: it has {listed(columns)}{hint}"
    fix = f"rename the fields, or name them in the source's columns ({known})"
    raise InputError(Fault(f"{name}:{row.line}", what, fix, code="SF-DATA-FORMAT"))


def convert(rows: Iterable[Row], layout: str, name: str) -> list[Conversation]:
    """All rows as conversations, of a pair the better and then the worse.

    layout: a key of LAYOUTS.

    InputError lists the faulty rows.
    """
    return converted(rows, LAYOUTS[layout].read, name)


def converted(rows: Iterable[Row], read: Reader, name: str) -> list[Conversation]:
    """What `read` makes of the rows of the file `name`."""
    return list(itertools.chain.from_iterable(each_row(rows, lambda row: conversations_of(row, read), name)))


def conversations_of(row: Row, read: Reader) -> list[Conversation]:
    """What `read` makes of a row, one conversation or two, with its number and line."""
    found = read(row.value)
    several = found if isinstance(found, tuple) else (found,)
    return [Conversation(one.turns, row.number, row.line, one.tools, one.good) for one in several]


def unused_in(record: Record, layout: str) -> list[str]:
    """Names of the record's fields that the layout does not read."""
    table = LAYOUTS[layout]
    names = [name for name in record if name not in table.fields]
    if table.turn_key:
        dialogue = _dialogue(record) if table.needed[0] not in record else table.needed[0]
        unread = (name for turn in record[dialogue] for name in turn if name not in table.turn_fields)
        names += [f"{dialogue}[].{name}" for name in unread]
    return names


_READS: Mapping[Kind, Reader] = {
    "answers": read_messages,
    "pairs": read_preference,
    "judged": read_judged,
    "prompts": read_prompt,
}
_WANTED: Mapping[Kind, str] = {
    "answers": "a text, a list of messages, or {'messages': …, 'tools': …}",
    "pairs": "{'prompt': …, 'chosen': …, 'rejected': …}",
    "judged": "{'prompt': …, 'completion': …, 'label': true or false}",
    "prompts": "a text, a list of messages, or {'prompt': …}",
}
_LIST_FIELD: Mapping[Kind, str] = {"answers": "messages", "prompts": "prompt"}


def reader_with(read_record: Callable[[dict[str, Any]], Any], kind: Kind) -> Reader:
    """A user's function as a reader of records. Of answers it gets a record and returns its text, its list of messages,
    or {"messages": …, "tools": …}; all rules of the messages format hold. Of other kinds it returns a record as the
    formats preference, judged and prompts read it."""
    return lambda record: _read(read_record, record, kind)


def _read(
    read_record: Callable[[dict[str, Any]], Any], record: Record, kind: Kind
) -> Conversation | tuple[Conversation, ...]:
    try:
        found = read_record(dict(record))
    except Exception as error:  # the user's own code: whatever it raises belongs to this row
        raise RowFault(f"the function that reads records failed: {type(error).__name__}: {error}") from error
    if isinstance(found, str) and kind == "answers":
        return read_text({"text": found})
    if isinstance(found, list) and kind in _LIST_FIELD:
        found = {_LIST_FIELD[kind]: found}
    if isinstance(found, str) and kind == "prompts":
        found = {"prompt": found}
    if not isinstance(found, dict):
        what = f"the function that reads records returned {type(found).__name__}"
        raise RowFault(what, f"return {_WANTED[kind]}")
    return _READS[kind](found)
