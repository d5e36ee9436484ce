"""Read a source as conversations, in batches, so that only one batch of a file is in memory.

Faults of the file itself are raised before faults of its records, and faults of records are raised together after the
last record was read (`RowFaults`).

`reader_with` turns a user's function into a reader with the same rules.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

from surefoot.data.formats import (
    LAYOUTS,
    Conversation,
    FormatScan,
    Reader,
    RowFault,
    Turn,
    conversations_of,
    retag,
)
from surefoot.data.formats.conversation import MARK
from surefoot.data.formats.preference import AS_TURNS, read_judged, read_preference, read_prompt, unsplit
from surefoot.data.formats.registry import Record, read_text
from surefoot.data.formats.spool import BATCH, Batches
from surefoot.data.formats.supervised import ARGUMENTS, read_messages, template_arguments
from surefoot.data.sources.records import Kind, Row, Source, read_rows
from surefoot.data.sources.tables import as_files
from surefoot.method_facts.methods import FORMATS, methods_for
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

CUSTOM = "custom"
_PLACEHOLDER = re.compile(r"\{\{ ?\w+ ?\}\}")
_SHORT = 80  # maximum characters of an example prompt
_FIRST_WORDS = 5  # words of a plain text used as an example prompt
_TEXTS = ("content", "context", "thought")  # of a turn
_KINDS = 8  # maximum kinds of fault, and rows per kind, that are listed; others are counted


class Numbered(Protocol):
    """A record or a conversation, with its number in the file and its first line, both from 1."""

    @property
    def number(self) -> int: ...
    @property
    def line(self) -> int: ...


Item = TypeVar("Item", bound=Numbered)
Result = TypeVar("Result")


class RowFaults(Generic[Item]):
    """Collects the faulty rows of the file `name`."""

    def __init__(self, name: str):
        self._name = name
        self._found: dict[tuple[str, str, str], list[int]] = {}  # (what, fix, code) -> row numbers
        self._lines: list[int] = []  # line of the first row of each kind
        self._rest = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def attempt(self, item: Item, do: Callable[[Item], Result]) -> Result | None:
        """Call `do` and return its result; on a RowFault, note it and return None."""
        try:
            return do(item)
        except RowFault as fault:
            self.note(item, fault)
            return None

    def note(self, item: Item, fault: RowFault) -> None:
        """Add the fault of a row."""
        kind = (fault.what, fault.fix, fault.code)
        if kind in self._found:
            self._found[kind].append(item.number)
        elif len(self._found) < _KINDS:
            self._found[kind] = [item.number]
            self._lines.append(item.line)
        else:
            self._rest += 1

    def refuse(self) -> None:
        """Raise one InputError for all faults, if there are any. Each kind of fault is listed once, with its first row
        and the numbers of the others; after _KINDS kinds, rows are only counted."""
        faults = [
            Fault(f"{self._name}:{line}", f"row {rows[0]}: {what}", _also(rows[1:], fix), code=code)
            for line, ((what, fix, code), rows) in zip(self._lines, self._found.items(), strict=True)
        ]
        if self._rest:
            faults.append(Fault(self._name, f"{self._rest} more rows have faults", code="SF-DATA-ROW"))
        if faults:
            raise InputError(faults)


def each_row(items: Iterable[Item], do: Callable[[Item], Result], name: str) -> list[Result]:
    """Call `do` for every row of the file `name`. Raises one InputError for all rows with faults, see `RowFaults`."""
    faults = RowFaults[Item](name)
    results = [faults.attempt(item, do) for item in items]
    faults.refuse()
    return cast("list[Result]", results)


def _also(rows: Sequence[int], fix: str) -> str:
    """Prefix the fix with the other rows that have the same fault."""
    if not rows:
        return fix
    same = f"the same in row{'s' if len(rows) > 1 else ''} {first_few(rows, _KINDS)}"
    return f"{same}; {fix}" if fix else same


def completed(one: Conversation, source: Source) -> Conversation:
    """Leave out the record's system message if the source says so, and put in the source's, if there is none then, and
    its texts for placeholders."""
    turns = one.turns
    if source.drop_system and turns[0].role == "system":
        turns = turns[1:] or turns
    if source.system and turns[0].role not in ("system", "text", "tokens"):
        turns = (Turn("system", source.system), *turns)
    for word, value in source.fill.items():
        texts = [{name: getattr(turn, name).replace(f"{{{{{word}}}}}", value) for name in _TEXTS} for turn in turns]
        turns = tuple(replace(turn, **one) for turn, one in zip(turns, texts, strict=True))
    return one if turns is one.turns else replace(one, turns=turns)


class Reading:
    """Reads the conversations of one file. The attributes are complete once all records were read.

    rows: number of records in the file.
    used: number of records used, from the start of the file.
    texts: all records are plain texts.
    several: some conversation has more than one answer. arguments: some has values for the template's variables.
    placeholders, placeholder, example_prompt: see `SourceFacts`.
    """

    def __init__(
        self,
        source: Source,
        kind: Kind,
        limit: int | None,
        *,
        texts_alone: bool = False,
        read: Reader | None = None,
        dialogues: bool = True,
        pictures: Path | None = None,
    ):
        """Prepare to read the source; `batches` does it.

        limit: number of records to use, from the start; None: all.
        texts_alone: refuse records with turns.
        read: reader of records in the custom format.
        dialogues: split a dialogue that is one text into turns.
        pictures: folder for pictures whose bytes are in a table.
        """
        self._source, self._limit = source, limit
        self._kind: Kind = kind
        self._texts_alone, self._read, self._pictures, self._dialogues = texts_alone, read, pictures, dialogues
        self._scan: FormatScan | None = None
        self._first: Row | None = None
        self._begins_with_text = False
        self.rows = self.used = 0
        self.texts, self.several, self.arguments = True, False, False
        self.placeholders: list[tuple[int, int]] = []
        self.placeholder = self.example_prompt = ""

    def batches(self) -> Batches:
        """Iterate over all conversations in order; of a pair, the better comes first. Call it once. After the first
        fault nothing more is yielded, and InputError is raised when all records were read."""
        name, rows = self._source.name, self._used_rows()
        self._first = first = next(rows)
        try:
            read = self._reader(first)
        except InputError:
            for _ in rows:  # faults of the file itself take precedence
                pass
            raise
        faults, dialogue = RowFaults[Row](name), None
        batch: list[Conversation] = []
        for row in itertools.chain([first], rows):
            if self._scan is not None:
                self._scan.count(row)
            try:
                arguments = template_arguments(row.value) if ARGUMENTS in self._source.columns else ""
                found = [
                    replace(completed(one, self._source), arguments=arguments) for one in conversations_of(row, read)
                ]
            except RowFault as fault:
                faults.note(row, fault)
                continue
            if faults or dialogue:
                continue
            if self._scan is not None:
                self._scan.note_unused(row)
                found = found[:1] if self._better_alone else found
            if self._kind == "prompts":
                found = [replace(one, record=row.value) for one in found]
            if row is first:
                self._begins_with_text = found[0].turns[0].role == "text"
            if self._texts_alone:
                dialogue = next((one for one in found if one.turns[0].role != "text"), None)
            batch += found
            if len(batch) >= BATCH:
                self._note(batch)
                yield batch
                batch = []
        if self._scan is not None:
            self._scan.refuse()
        faults.refuse()
        if dialogue is not None:
            what = f"row {dialogue.number}: is a conversation ({self.layout}), but pretraining needs plain texts"
            other = methods_for("answers")
            fix = f"set the source's columns to the field with the text: {{text: FIELD}}, or choose stage: {other}"
            raise InputError(Fault(f"{name}:{dialogue.line}", what, fix, code="SF-DATA-FORMAT"))
        self._note(batch)
        yield batch

    @property
    def layout(self) -> str:
        if self._scan is None:
            return "text" if self._begins_with_text else CUSTOM
        return self._scan.layout

    @property
    def reason(self) -> str:
        """How the layout was found, and how its records are read."""
        if self._scan is None or self._first is None:
            return "read by your function"
        how = self._scan.reason
        reasons = [how if self._dialogues else how.replace(AS_TURNS, ", not split into turns")]
        if not self._source.only_columns:  # otherwise the source's notes list the columns
            reasons += [f"{own!r} read as {field!r}" for field, own in self._source.columns.items()]
        reasons += [f"{field!r} is {text!r}" for field, text in self._source.compose.items()]
        if self.layout == "prompt-completion" and isinstance(self._first.value.get("prompt"), str):
            reasons.append("a pair of texts goes through the template")
        if self._better_alone:
            reasons.append("the better answers are learned")
        return "; ".join(reasons)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the fields that are not read."""
        unused = self._scan.unused if self._scan is not None else ()
        return tuple(name for name in unused if name != ARGUMENTS or name not in self._source.columns)

    @property
    def _better_alone(self) -> bool:
        """Whether the better answers of pairs are learned as plain answers, which the user must request."""
        return FORMATS.get(self.layout) == "pairs" and self._kind == "answers"

    def _used_rows(self) -> Iterator[Row]:
        """Yield the rows up to the limit. Those beyond it are read as well, to check that the file is intact."""
        for row in retag(read_rows(self._source), self._source.tags):
            self.rows += 1
            if self._limit is None or self.rows <= self._limit:
                self.used += 1
                if self._pictures is not None and self._source.kind == ".parquet":
                    row = replace(row, value=as_files(row.value, self._pictures))
                yield row

    def _reader(self, first: Row) -> Reader:
        if self._read is not None:
            return self._read
        self._scan = FormatScan(self._kind, self._source.format, first, self._source.name, texts=self._texts_alone)
        self._scan.refuse_misspelt((*self._source.constant, *self._source.compose))
        read = LAYOUTS[self._scan.layout].read
        return read if self._dialogues else lambda record: read(unsplit(record))

    def _note(self, batch: list[Conversation]) -> None:
        self.texts = self.texts and all(turn.role == "text" for one in batch for turn in one.turns)
        self.several = self.several or any(sum(turn.role == "assistant" for turn in one.turns) > 1 for one in batch)
        self.arguments = self.arguments or any(one.arguments for one in batch)
        places, placeholder = _find_placeholders(batch)
        self.placeholders += places
        self.placeholder = self.placeholder or placeholder
        self.example_prompt = self.example_prompt or find_example_prompt(batch)


def _find_placeholders(conversations: Iterable[Conversation]) -> tuple[list[tuple[int, int]], str]:
    """Return (number, line) of the conversations with a placeholder such as {{name}}, and the first placeholder."""
    found = [
        (one.number, one.line, match[0])
        for one in conversations
        if (match := _PLACEHOLDER.search("\n".join(turn.text for turn in one.turns)))
    ]
    return [(number, line) for number, line, _ in found], found[0][2] if found else ""


def find_example_prompt(conversations: Iterable[Conversation]) -> str:
    """Return the first short one-line question, or for plain texts the first words of one; "" if there is none.

    The result is printed in the model card, so anything that may be a path or an address is skipped.
    """
    prompts = (
        " ".join(turn.content.split()[:_FIRST_WORDS]) if turn.role == "text" else turn.text
        for one in conversations
        for turn in one.turns[:2]
        if turn.role in ("user", "text")
    )
    return next((text for text in prompts if _is_plain(text)), "")


def _is_plain(text: str) -> bool:
    plain = text.isprintable() and MARK not in text and not set(text) & set("/\\@")
    return plain and bool(text.strip()) and len(text) <= _SHORT


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
    """Turn a user's function into a reader. The function gets a record as a dict. For answers it returns a text, a list
    of messages, or {"messages": …, "tools": …}, by the rules of the messages format. For other kinds it returns a
    record in the preference, judged or prompts format."""
    return lambda record: _read(read_record, record, kind)


def _read(
    read_record: Callable[[dict[str, Any]], Any], record: Record, kind: Kind
) -> Conversation | tuple[Conversation, ...]:
    try:
        found = read_record(dict(record))
    except Exception as error:  # the user's code may raise anything; report it as a fault of this row
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
