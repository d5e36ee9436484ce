"""The table of record formats, and the detection of a file's format.

Each entry lists the fields that a format requires and reads, and its reader. `format: auto` takes the first format
whose required fields the first record has, and reports it.

The format must match what the stage learns from. Supervised training refuses preference data, because it would learn
the bad answers as well; preference stages refuse plain answers. Two kinds of preference data are recognized by their
fields, as in TRL and LLaMA-Factory: a better and a worse answer in one record (`chosen`, `rejected`), and answers
labeled good or bad (`label`: true or false).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.data.formats.conversation import (
    JUDGED,
    MARK,
    TRAINED,
    WEIGHTS,
    Conversation,
    RowFault,
    Turn,
    filled,
    judgement_field,
    listed,
    read_images,
)
from surefoot.data.formats.preference import (
    ANSWERS,
    BESIDES,
    OPENINGS,
    PAIR,
    form_of,
    is_token_pair,
    judged_form,
    opening_field,
    prompt_form,
    read_judged,
    read_judged_tokens,
    read_preference,
    read_prompt,
    read_token_pair,
)
from surefoot.data.formats.query import (
    QUERY,
    REJECTED,
    is_lone_answer,
    is_swift_pair,
    read_query_response,
    read_swift_pair,
)
from surefoot.data.formats.supervised import (
    THOUGHTS,
    TOKEN_FIELDS,
    TOKENS,
    read_alpaca,
    read_cauldron,
    read_commonsense,
    read_messages,
    read_prompt_completion,
    read_sharegpt,
    read_tokens,
)
from surefoot.data.sources.records import Kind, Row
from surefoot.method_facts.losses import joined
from surefoot.method_facts.methods import FORMATS, methods_for
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import nearest_words

_DIALOGUES = ("messages", "conversations")  # fields that may hold a list of turns
_MARKS = (*TRAINED, *WEIGHTS)
Record = Mapping[str, Any]
Reader = Callable[[Record], Conversation | tuple[Conversation, ...]]


@dataclass(frozen=True)
class Layout:
    """One record format.

    read: convert a record to its conversation, or to the two of a pair.
    needed, besides: required and optional fields.
    turn_key: for formats with turns, the field that every turn has.
    turn_fields: fields of a turn that are read, or that do not affect what is learned.
    form: describe which variant of the format a record uses, for the audit.
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
        """Name the fields by which the record was recognized."""
        if self.turn_key:
            return f"{_dialogue(record)!r}, whose turns have {self.turn_key!r}"
        return listed(self.needed)


def read_text(record: Record) -> Conversation:
    """{"text"}, or a lone answer in {"messages"} (ms-swift): one text, learned in full."""
    text = filled(record["messages"][0], "content") if is_lone_answer(record) else filled(record, "text")
    return Conversation((Turn("text", text),))


def _dialogue(record: Record) -> str:
    return next((name for name in _DIALOGUES if name in record), _DIALOGUES[0])


_ALPACA = ("input", "system", "history", "images")
LAYOUTS: Mapping[str, Layout] = joined(
    FORMATS,
    {
        "tokens": Layout(read_tokens, (TOKENS,), TOKEN_FIELDS),
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
        "cauldron": Layout(read_cauldron, ("images", "texts")),
        "commonsense": Layout(read_commonsense, ("instruction", "output", "answer"), _ALPACA),
        "alpaca": Layout(read_alpaca, ("instruction", "output"), _ALPACA),
        "query-response": Layout(read_query_response, QUERY, ("system", "history", "images")),
        "prompt-completion": Layout(read_prompt_completion, ("prompt", "completion"), ("tools", "images")),
        "text": Layout(read_text, ("text",), ("messages",)),
        "preference": Layout(read_preference, PAIR, (*OPENINGS, *BESIDES), form=form_of),
        "judged": Layout(read_judged, (), (*JUDGED, *OPENINGS, *BESIDES, *ANSWERS), form=judged_form),
        "token-pairs": Layout(read_token_pair, PAIR),
        "swift-pairs": Layout(read_swift_pair, (), (*REJECTED, "messages", *QUERY, *BESIDES, "rejected_images")),
        "token-judged": Layout(read_judged_tokens, (TOKENS,), (*JUDGED, *TOKEN_FIELDS)),
        "prompts": Layout(read_prompt, (), (*OPENINGS, *BESIDES, *ANSWERS, *PAIR), form=prompt_form),
    },
    ("method_facts.methods.FORMATS", "data.formats.registry.LAYOUTS"),
)
FOR_ANSWERS = tuple(name for name in LAYOUTS if FORMATS[name] == "answers")


def recognize(row: Row, name: str, *, among: Sequence[str] = FOR_ANSWERS) -> tuple[str, str]:
    """Detect the layout of the first record. Returns the layout and the reason.

    name: the file, for the InputError if no layout of `among` fits.
    """
    first = row.value
    for layout in among:
        if LAYOUTS[layout].fits(first):
            besides = [field for field in LAYOUTS[layout].besides if first.get(field) and field not in _DIALOGUES]
            more = f", and also {listed(besides)}" if besides else ""
            return layout, f"the first record has {LAYOUTS[layout].seen_in(first)}{more}"
    columns = list(first)
    known = "; ".join(f"{layout}: {listed(LAYOUTS[layout].needed)}" for layout in among)
    fields = [field for layout in among for field in LAYOUTS[layout].needed]
    like = [(field, match) for field in fields if field not in columns for match in nearest_words(field, columns, 1)]
    hint = f" ({like[0][1]!r} looks like {like[0][0]!r})" if like else ""
    what = f"row 1 has no known format: it has {listed(columns)}{hint}"
    fix = f"rename the fields, or map them in the source's columns ({known})"
    raise InputError(Fault(f"{name}:{row.line}", what, fix, code="SF-DATA-FORMAT"))


def conversations_of(row: Row, read: Reader) -> list[Conversation]:
    """Read a row as one conversation, or two for a pair, with the row's number and line."""
    found = read(row.value)
    several = found if isinstance(found, tuple) else (found,)
    images = _images(row.value, several)
    return [replace(one, number=row.number, line=row.line, images=images) for one in several]


def _images(record: Record, conversations: Sequence[Conversation]) -> tuple[str, ...]:
    """Return the record's list of pictures. If no text has a place for a picture, the field `images` may be something
    else and is ignored when it is malformed."""
    turns = [turn for one in conversations for turn in one.turns]
    try:
        images = read_images(record)
    except RowFault:
        if any(turn.images or MARK in turn.text for turn in turns):
            raise
        return ()
    if record.get("images") == [] and any(MARK in turn.text for turn in turns):
        raise RowFault(f"has {MARK} in its texts, but 'images' is empty", "list a path for each", "SF-DATA-PICTURE")
    return images


def unused_in(record: Record, layout: str) -> list[str]:
    """Return the names of the record's fields that the layout does not read."""
    table = LAYOUTS[layout]
    names = [name for name in record if name not in table.fields]
    if table.turn_key:
        dialogue = _dialogue(record) if table.needed[0] not in record else table.needed[0]
        unread = (name for turn in record[dialogue] for name in turn if name not in table.turn_fields)
        names += [f"{dialogue}[].{name}" for name in unread]
    return names


_JUDGED = (*_DIALOGUES, *ANSWERS, TOKENS)  # fields with the answer that a mark judges
_QUESTIONS = ("prompt", "question", "instruction", "query", "input")


def kind_of_record(record: Mapping[str, Any]) -> Kind:
    """Return the kind of data that the record's fields suggest: pairs, judged or answers (never prompts)."""
    if all(column in record for column in PAIR) or is_swift_pair(record):
        return "pairs"
    return "judged" if isinstance(record.get(judgement_field(record) or ""), bool) else "answers"


class FormatScan:
    """Detects a file's format from its first record, and collects statistics while all records are read.

    layout: a key of LAYOUTS.
    rows: number of records seen.
    unused: names of the fields that the layout does not read, in order of appearance.
    """

    def __init__(self, kind: Kind, requested: str, first: Row, name: str, *, texts: bool = False):
        """Detect the format. Raises InputError for a first record that this kind of stage cannot learn from.

        kind: what the stage learns from.
        requested: "auto" or a layout's name.
        name: the file.
        texts: prefer the text layout if the record has a `text` field.
        """
        self._name, self._kind, self._for_all = name, kind, kind == "answers" and requested == "auto"
        self.layout, self._how = _layout_of(kind, requested, first, name, texts)
        self._form = LAYOUTS[self.layout].form if kind != "answers" else None
        self._forms: Counter[str] = Counter()
        self._unused: dict[str, None] = {}
        self.rows = self._bad = 0
        self._first_bad: tuple[Row, str] | None = None

    def count(self, row: Row) -> None:
        """Count a record, valid or not."""
        self.rows += 1
        if self._form is not None:
            self._forms[self._form(row.value)] += 1
        mark = judgement_field(row.value)
        if mark is not None and row.value[mark] is False and any(field in row.value for field in _JUDGED):
            self._bad += 1
            self._first_bad = self._first_bad or (row, mark)

    def note_unused(self, row: Row) -> None:
        """Note the unread fields of a record that the layout could read."""
        self._unused |= dict.fromkeys(unused_in(row.value, self.layout))

    def refuse_misspelt(self, written: Iterable[str]) -> None:
        """Raise InputError for a field that the layout does not read and that looks like one it does. Other fields of
        prompts may be read by rewards.

        written: fields that the source writes into every record.
        """
        known = LAYOUTS[self.layout].fields
        for field in written if self._kind != "prompts" else ():
            if field not in known and (near := nearest_words(field, known, 1)):
                what = f"the source writes {field!r} into every record, but records of {self.layout} have no such field"
                raise InputError(Fault(self._name, what, f"did you mean {near[0]!r}?", code="SF-DATA-FORMAT"))

    def refuse(self) -> None:
        """Raise InputError if supervised training met answers labeled bad, unless the user named the format. If all
        are labeled good, they can be learned."""
        if not self._for_all or self._first_bad is None:
            return
        row, mark = self._first_bad
        what = (
            f"row {row.number} is a preference record (its {mark!r} is false, as in {self._bad:,} of {self.rows:,} "
            "records): supervised training would also learn its bad answers"
        )
        fix = (
            f"choose stage {methods_for('judged')}; or keep only the records whose {mark!r} is true; or set the "
            "source's format to learn them all"
        )
        raise InputError(Fault(f"{self._name}:{row.line}", what, fix, code="SF-DATA-FORMAT"))

    @property
    def reason(self) -> str:
        """How the layout was found, and which variants of it the records use."""
        if len(self._forms) <= 1:
            return "; ".join([self._how, *self._forms])
        counts = (f"{count:,} records: {words}" for words, count in self._forms.most_common())
        return f"{self._how}; {'; '.join(counts)}"

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(self._unused)


def scan_format(kind: Kind, requested: str, rows: Iterable[Row], name: str, *, texts: bool = False) -> FormatScan:
    """Scan all rows and return the filled `FormatScan`. Arguments and InputErrors as there."""
    scan: FormatScan | None = None
    for row in rows:
        scan = scan or FormatScan(kind, requested, row, name, texts=texts)
        scan.count(row)
    assert scan is not None  # a source has at least one
    scan.refuse()
    return scan


def _layout_of(kind: Kind, requested: str, first: Row, name: str, texts: bool) -> tuple[str, str]:
    """Return the layout of the first record, and how it was found."""
    if kind != "answers":
        return _layout_for(kind, requested, first, name)
    if requested != "auto":
        return requested, "asked for"
    if all(column in first.value for column in PAIR):
        what = f"row 1 is a preference record (it has {listed(PAIR)}), so it is open which answer to learn"
        advice = f"choose stage {methods_for('pairs')}, or data.format: preference; {_advice(first.value)}"
        raise InputError(Fault(f"{name}:{first.line}", what, advice, code="SF-DATA-FORMAT"))
    if texts and is_lone_answer(first.value):
        return "text", "the first record has a lone answer in 'messages'"
    if texts and "text" in first.value:
        return recognize(first, name, among=("text",))
    return recognize(first, name)


def _layout_for(kind: Kind, requested: str, row: Row, name: str) -> tuple[str, str]:
    """Return the layout for a stage that learns from pairs, judged answers or prompts. Raises InputError for a record
    of another kind; the message names the stage for it."""
    layout = {"pairs": "preference", "judged": "judged", "prompts": "prompts"}[kind]
    if kind == "pairs" and is_token_pair(row.value):
        layout = "token-pairs"
    elif kind == "pairs" and is_swift_pair(row.value):
        layout = "swift-pairs"
    elif kind == "judged" and TOKENS in row.value:
        layout = "token-judged"
    if requested not in ("auto", layout) and (kind != "prompts" or requested == "text"):
        what = f"is {requested}, but this stage reads {layout}"
        raise InputError(
            Fault("data.format", what, f"use auto or {layout}, or choose another stage", code="SF-DATA-FORMAT")
        )
    first = row.value
    pair, judged = kind_of_record(first) == "pairs", any(mark in first for mark in JUDGED)
    fits = {"pairs": pair, "judged": judged and not pair, "prompts": pair or opening_field(first) is not None}[kind]
    if not fits:
        raise InputError(
            Fault(f"{name}:{row.line}", f"row 1 {_other_kind(kind, first)}", _KIND_FIX[kind], code="SF-DATA-FORMAT")
        )
    return layout, "asked for" if requested != "auto" else f"the first record has {listed(_present(kind, first))}"


_KIND_FIX: Mapping[Kind, str] = {
    "pairs": "name the fields in the source's columns: {chosen: FIELD, rejected: FIELD}, or choose another stage",
    "judged": "name the field in the source's columns: {label: FIELD}, or choose another stage",
    "prompts": "name the field in the source's columns: {prompt: FIELD}",
}


def _present(kind: Kind, record: Mapping[str, Any]) -> list[str]:
    marks = {"pairs": (*PAIR, *REJECTED), "judged": JUDGED, "prompts": ()}[kind]
    return [name for name in (*OPENINGS, *marks) if name in record]


def _other_kind(kind: Kind, record: Mapping[str, Any]) -> str:
    """Describe what the record is, and what this stage learns from."""
    wanted = {
        "pairs": f"this stage compares two answers ({listed(PAIR)})",
        "judged": f"this stage needs to know for every answer whether it is good ({listed(JUDGED)})",
        "prompts": f"this stage answers prompts ({listed(OPENINGS)})",
    }[kind]
    if kind_of_record(record) == "pairs":
        return f"is a pair for stage {methods_for('pairs')} (it has {listed(_present('pairs', record))}), but {wanted}"
    if judgement_field(record) is not None:
        return (
            f"is a judged answer for stage {methods_for('judged')} (it has {judgement_field(record)!r}), but {wanted}"
        )
    known = next((layout for layout in LAYOUTS if LAYOUTS[layout].needed and LAYOUTS[layout].fits(record)), None)
    stage = methods_for("answers", plain_texts=known == "text")
    found = f"is {known} data for stage {stage} (it has {listed(record)})" if known else f"has {listed(record)}"
    return f"{found}, but {wanted}"


def _advice(record: Mapping[str, Any]) -> str:
    """Suggest columns that let the better answers be read as plain answers, after trying them on the record."""
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
