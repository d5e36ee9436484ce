"""The table of record formats, and which of them a file has.

A row of the table names the fields that a format needs and reads, and its reader. `format: auto` takes the first row
whose needed fields the first record has, and says so.

What a file holds is compared with what a stage learns from. Preference data met by supervised training are refused,
because learning all of it would teach the bad answers as well; and so are plain answers where a stage compares two, or
wants to know which are good. Two kinds of preference data are known by their fields: a better and a worse answer in one
record (`chosen`, `rejected`), and answers that are marked good or bad (`label`: true or false), as TRL and
LLaMA-Factory have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.data.formats.conversation import MARK, Conversation, Turn, filled, listed, read_images
from surefoot.data.formats.preference import (
    ANSWERS,
    BESIDES,
    MARKS,
    OPENINGS,
    PAIR,
    form_of,
    judged_form,
    mark_field,
    opening_field,
    prompt_form,
    read_judged,
    read_preference,
    read_prompt,
)
from surefoot.data.formats.rows import RowFault
from surefoot.data.formats.supervised import (
    THOUGHTS,
    read_alpaca,
    read_commonsense,
    read_messages,
    read_prompt_completion,
    read_sharegpt,
)
from surefoot.data.sources.records import Kind, Row
from surefoot.method_facts.losses import joined
from surefoot.method_facts.methods import FORMATS, methods_for
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


_ALPACA = ("input", "system", "history", "images")
LAYOUTS: Mapping[str, Layout] = joined(
    FORMATS,
    {
        "messages": Layout(
            read_messages,
            ("messages",),
            ("conversations", "tools", "system", "images"),
            "role",
            ("role", "content", "tool_calls", "tool_call_id", "name", *THOUGHTS, *_MARKS),
        ),
        "sharegpt": Layout(
            read_sharegpt,
            ("conversations",),
            ("messages", "tools", "system", "images"),
            "from",
            ("from", "value", "tool_call_id", "name", *_MARKS),
        ),
        "commonsense": Layout(read_commonsense, ("instruction", "output", "answer"), _ALPACA),
        "alpaca": Layout(read_alpaca, ("instruction", "output"), _ALPACA),
        "prompt-completion": Layout(read_prompt_completion, ("prompt", "completion"), ("tools", "images")),
        "text": Layout(read_text, ("text",)),
        "preference": Layout(read_preference, PAIR, (*OPENINGS, *BESIDES, "images"), form=form_of),
        "judged": Layout(read_judged, (), (*MARKS, *OPENINGS, *BESIDES, *ANSWERS), form=judged_form),
        "prompts": Layout(read_prompt, (), (*OPENINGS, *BESIDES, *ANSWERS, *PAIR), form=prompt_form),
    },
    ("method_facts.methods.FORMATS", "data.formats.registry.LAYOUTS"),
)
FOR_ANSWERS = tuple(name for name in LAYOUTS if FORMATS[name] == "answers")


def recognise(row: Row, name: str, *, among: Sequence[str] = FOR_ANSWERS) -> tuple[str, str]:
    """The layout of the first record and the reason.

    name: the file, for the error when none of `among` fits.
    """
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


def conversations_of(row: Row, read: Reader) -> list[Conversation]:
    """What `read` makes of a row, one conversation or two, with its number and line."""
    found = read(row.value)
    several = found if isinstance(found, tuple) else (found,)
    images = _images(row.value, several)
    return [Conversation(one.turns, row.number, row.line, one.tools, one.good, images) for one in several]


def _images(record: Record, conversations: Sequence[Conversation]) -> tuple[str, ...]:
    """The record's own list of pictures. A field of that name may be something else where no text has a place for
    one."""
    turns = [turn for one in conversations for turn in one.turns]
    try:
        return read_images(record)
    except RowFault:
        if any(turn.images or MARK in turn.text for turn in turns):
            raise
        return ()


def unused_in(record: Record, layout: str) -> list[str]:
    """Names of the record's fields that the layout does not read."""
    table = LAYOUTS[layout]
    names = [name for name in record if name not in table.fields]
    if table.turn_key:
        dialogue = _dialogue(record) if table.needed[0] not in record else table.needed[0]
        unread = (name for turn in record[dialogue] for name in turn if name not in table.turn_fields)
        names += [f"{dialogue}[].{name}" for name in unread]
    return names


_MARK = "label"
_ANSWERS = ("messages", "conversations", "completion", "output")  # fields that hold what `label` judges
_QUESTIONS = ("prompt", "question", "instruction", "query", "input")


def kind_of_record(record: Mapping[str, Any]) -> Kind:
    """What can be learned from records like this one. Prompts are never meant by themselves."""
    if all(column in record for column in PAIR):
        return "pairs"
    return "judged" if isinstance(record.get(mark_field(record) or ""), bool) else "answers"


class Seen:
    """What the records of a file are: told by the first one, and counted as all of them pass by.

    layout: a key of LAYOUTS.
    rows: how many were seen.
    unused: names of the fields that the layout does not read, in order of appearance.
    """

    def __init__(self, kind: Kind, requested: str, first: Row, name: str, *, texts: bool = False):
        """InputError for a record that a stage of this kind cannot learn from.

        kind: what is to be learned from them.
        requested: auto or a layout's name.
        name: the file.
        texts: a `text` field is taken before any other layout.
        """
        self._name, self._for_all = name, kind == "answers" and requested == "auto"
        self.layout, self._how = _layout_of(kind, requested, first, name, texts)
        self._form = LAYOUTS[self.layout].form if kind != "answers" else None
        self._forms: Counter[str] = Counter()
        self._unused: dict[str, None] = {}
        self.rows = self._bad = 0
        self._first_bad: tuple[int, int] | None = None

    def see(self, row: Row) -> None:
        """One record more, whatever it is."""
        self.rows += 1
        if self._form is not None:
            self._forms[self._form(row.value)] += 1
        if row.value.get(_MARK) is False and any(field in row.value for field in _ANSWERS):
            self._bad += 1
            self._first_bad = self._first_bad or (row.number, row.line)

    def note_unused(self, row: Row) -> None:
        """One record more that the layout could read."""
        self._unused |= dict.fromkeys(unused_in(row.value, self.layout))

    def refuse(self) -> None:
        """InputError for answers of which some are marked as bad, unless somebody named the layout. Answers that are
        all marked as good can be learned."""
        if not self._for_all or self._first_bad is None:
            return
        number, line = self._first_bad
        what = (
            f"row {number} is a preference record (its {_MARK!r} is false, as in {self._bad:,} of {self.rows:,} "
            "records): supervised training would learn its bad answers, too"
        )
        fix = (
            f"choose stage {methods_for('judged')}; or keep only the records whose {_MARK!r} is true, or name the "
            "source's format to learn them all"
        )
        raise InputError(Fault(f"{self._name}:{line}", what, fix, code="SF-DATA-FORMAT"))

    @property
    def reason(self) -> str:
        """How the layout is known, and in which ways the records are written."""
        if len(self._forms) <= 1:
            return "; ".join([self._how, *self._forms])
        counts = (f"{count:,} records: {words}" for words, count in self._forms.most_common())
        return f"{self._how}; {'; '.join(counts)}"

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(self._unused)


def look(kind: Kind, requested: str, rows: Iterable[Row], name: str, *, texts: bool = False) -> Seen:
    """What all these records are; arguments and InputErrors as `Seen` has them."""
    seen: Seen | None = None
    for row in rows:
        seen = seen or Seen(kind, requested, row, name, texts=texts)
        seen.see(row)
    assert seen is not None  # a source has at least one
    seen.refuse()
    return seen


def _layout_of(kind: Kind, requested: str, first: Row, name: str, texts: bool) -> tuple[str, str]:
    """The layout and how it is known, from the first record."""
    if kind != "answers":
        return _layout_for(kind, requested, first, name)
    if requested != "auto":
        return requested, "asked for"
    if all(column in first.value for column in PAIR):
        what = f"row 1 is a preference record (it has {listed(PAIR)}): nothing says which answer is to be learned"
        advice = f"choose stage {methods_for('pairs')}, or data.format preference; {_advice(first.value)}"
        raise InputError(Fault(f"{name}:{first.line}", what, advice, code="SF-DATA-FORMAT"))
    if texts and "text" in first.value:
        return recognise(first, name, among=("text",))
    return recognise(first, name)


def _layout_for(kind: Kind, requested: str, row: Row, name: str) -> tuple[str, str]:
    """For a stage that learns from pairs, judged answers or prompts. InputError, with the stage that could learn from
    it, for a record of another kind."""
    layout = {"pairs": "preference", "judged": "judged", "prompts": "prompts"}[kind]
    if requested not in ("auto", layout) and (kind != "prompts" or requested == "text"):
        what = f"is {requested}, and this stage reads {layout}"
        raise InputError(
            Fault("data.format", what, f"use auto or {layout}, or choose another stage", code="SF-DATA-FORMAT")
        )
    first = row.value
    pair, judged = all(column in first for column in PAIR), mark_field(first) is not None
    fits = {"pairs": pair, "judged": judged and not pair, "prompts": pair or opening_field(first) is not None}[kind]
    if not fits:
        raise InputError(
            Fault(f"{name}:{row.line}", f"row 1 {_other_kind(kind, first)}", _KIND_FIX[kind], code="SF-DATA-FORMAT")
        )
    return layout, "asked for" if requested != "auto" else f"the first record has {listed(_seen(kind, first))}"


_KIND_FIX: Mapping[Kind, str] = {
    "pairs": "name the fields in the source's columns: {chosen: FIELD, rejected: FIELD}, or choose another stage",
    "judged": "name the field in the source's columns: {label: FIELD}, or choose another stage",
    "prompts": "name the field in the source's columns: {prompt: FIELD}",
}


def _seen(kind: Kind, record: Mapping[str, Any]) -> list[str]:
    marks = {"pairs": PAIR, "judged": MARKS, "prompts": ()}[kind]
    return [name for name in (*OPENINGS, *marks) if name in record]


def _other_kind(kind: Kind, record: Mapping[str, Any]) -> str:
    """What a record of another kind is, and what this one learns from."""
    wanted = {
        "pairs": f"this stage compares two answers ({listed(PAIR)})",
        "judged": f"this stage wants to know of every answer whether it is good ({listed(MARKS)})",
        "prompts": f"this stage answers prompts ({listed(OPENINGS)})",
    }[kind]
    if all(column in record for column in PAIR):
        return f"is a pair for stage {methods_for('pairs')} (it has {listed(PAIR)}), and {wanted}"
    if mark_field(record) is not None:
        return f"is a judged answer for stage {methods_for('judged')} (it has {mark_field(record)!r}), and {wanted}"
    known = next((layout for layout in LAYOUTS if LAYOUTS[layout].needed and LAYOUTS[layout].fits(record)), None)
    stage = methods_for("answers", plain_texts=known == "text")
    found = f"is {known} data for stage {stage} (it has {listed(record)})" if known else f"has {listed(record)}"
    return f"{found}, and {wanted}"


def _advice(record: Mapping[str, Any]) -> str:
    """The columns by which the better answers of such records can be read, where there are any: they were tried."""
    better = record["chosen"]
    attempts = [
        ({"messages": "chosen"}, lambda: read_messages({"messages": better})),
        ({"conversations": "chosen"}, lambda: read_sharegpt({"conversations": better})),
        *(
            (
                {"prompt": column, "completion": "chosen"},
                lambda column=column: read_prompt_completion({"prompt": record[column], "completion": better}),
            )
            for column in _QUESTIONS
            if column in record
        ),
    ]
    for columns, read in attempts:
        try:
            read()
        except RowFault:
            continue
        shown = ", ".join(f"{field}: {own}" for field, own in columns.items())
        return f"to learn the better answers, set the source's columns: {{{shown}}}"
    return "to learn the better answers, write a file of dialogues that end with them"
