"""From a source to conversations, in batches: no more of a file is held in memory than one batch.

A fault of the file itself is raised before faults of its records, and the records' faults are raised together, so
nothing is raised before the last record was read.

`reader_with` turns a user's function into a reader to which the same rules apply.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.data.formats import (
    LAYOUTS,
    Conversation,
    Reader,
    RowFault,
    RowFaults,
    Seen,
    ToolCall,
    Turn,
    conversations_of,
    retag,
)
from surefoot.data.formats.conversation import MARK
from surefoot.data.formats.preference import read_judged, read_preference, read_prompt
from surefoot.data.formats.registry import Record, read_text
from surefoot.data.formats.supervised import read_messages
from surefoot.data.sources.records import Kind, Row, Source, read_rows
from surefoot.data.sources.tables import as_files
from surefoot.method_facts.methods import methods_for
from surefoot.system.errors import Fault, InputError

CUSTOM = "custom"
_BATCH = 1024  # conversations
Batches = Iterator[list[Conversation]]
_PLACEHOLDER = re.compile(r"\{\{ ?\w+ ?\}\}")
_SHORT = 80  # characters of an example prompt
_FIRST_WORDS = 5


class Reading:
    """The conversations of one file, and what is known of its records once all of them were read.

    rows: how many the file holds.
    used: the first so many of them.
    texts: no conversation has turns.
    several: one has more than one answer.
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
        pictures: Path | None = None,
    ):
        """To be read by `batches`.

        limit: only the first so many records.
        texts_alone: records that have turns are refused.
        read: of records whose format is custom.
        pictures: a folder for those whose bytes lie in a table.
        """
        self._source, self._limit = source, limit
        self._kind: Kind = kind
        self._texts_alone, self._read, self._pictures = texts_alone, read, pictures
        self._seen: Seen | None = None
        self._first: Row | None = None
        self._begins_with_text = False
        self.rows = self.used = 0
        self.texts, self.several = True, False
        self.placeholders: list[tuple[int, int]] = []
        self.placeholder = self.example_prompt = ""

    def batches(self) -> Batches:
        """All of them in their order, of a pair the better and then the worse; to be called once. Gives nothing more
        after the first fault; raises InputError when all records were read."""
        name, rows = self._source.name, self._used_rows()
        self._first = first = next(rows)
        try:
            read = self._reader(first)
        except InputError:
            for _ in rows:  # which has its own faults, perhaps
                pass
            raise
        faults, strange = RowFaults[Row](name), None
        batch: list[Conversation] = []
        for row in itertools.chain([first], rows):
            if self._seen is not None:
                self._seen.see(row)
            try:
                found = conversations_of(row, read)
            except RowFault as fault:
                faults.note(row, fault)
                continue
            if faults or strange:
                continue
            if self._seen is not None:
                self._seen.note_unused(row)
                found = found[:1] if self._better_alone else found
            if self._kind == "prompts":
                found = [replace(one, record=row.value) for one in found]
            if row is first:
                self._begins_with_text = found[0].turns[0].role == "text"
            if self._texts_alone:
                strange = next((one for one in found if one.turns[0].role != "text"), None)
            batch += found
            if len(batch) >= _BATCH:
                self._note(batch)
                yield batch
                batch = []
        if self._seen is not None:
            self._seen.refuse()
        faults.refuse()
        if strange is not None:
            what = f"row {strange.number}: is a conversation ({self.layout}), and pretraining learns plain texts"
            other = methods_for("answers")
            fix = (
                f"name the field that holds the text in the source's columns: {{text: FIELD}}, or choose stage: {other}"
            )
            raise InputError(Fault(f"{name}:{strange.line}", what, fix, code="SF-DATA-FORMAT"))
        self._note(batch)
        yield batch

    @property
    def layout(self) -> str:
        if self._seen is None:
            return "text" if self._begins_with_text else CUSTOM
        return self._seen.layout

    @property
    def reason(self) -> str:
        """How the layout is known, and what else is to be said of how records are read."""
        if self._seen is None or self._first is None:
            return "read by your function"
        said = [self._seen.reason]
        if not self._source.only_columns:  # else its notes name them
            said += [f"{own!r} read as {field!r}" for field, own in self._source.columns.items()]
        if self.layout == "prompt-completion" and isinstance(self._first.value.get("prompt"), str):
            said.append("a pair of texts goes through the template")
        if self._better_alone:
            said.append("the better answers are learned")
        return "; ".join(said)

    @property
    def unused(self) -> tuple[str, ...]:
        """Names of the fields that nothing reads."""
        return self._seen.unused if self._seen is not None else ()

    @property
    def _better_alone(self) -> bool:
        """Only where it is asked for: see `Seen`."""
        return self.layout == "preference" and self._kind == "answers"

    def _used_rows(self) -> Iterator[Row]:
        """Those beyond the limit are read as well, since a file is whole or not."""
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
        self._seen = Seen(self._kind, self._source.format, first, self._source.name, texts=self._texts_alone)
        return LAYOUTS[self._seen.layout].read

    def _note(self, batch: list[Conversation]) -> None:
        self.texts = self.texts and all(turn.role == "text" for one in batch for turn in one.turns)
        self.several = self.several or any(sum(turn.role == "assistant" for turn in one.turns) > 1 for one in batch)
        places, placeholder = _find_placeholders(batch)
        self.placeholders += places
        self.placeholder = self.placeholder or placeholder
        self.example_prompt = self.example_prompt or find_example_prompt(batch)


@dataclass(frozen=True)
class Kept:
    """Conversations on the disk, as they were read once.

    digest: of all of them.
    again: all of them once more.
    """

    digest: str
    again: Callable[[], Batches]


@contextmanager
def kept(batches: Batches) -> Iterator[Kept]:
    """What a user's function makes of records is asked for once: it may be another thing the next time. The file has no
    name, and is gone when the block ends."""
    digest, separator = hashlib.sha256(), "["
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n") as file:
        for one in itertools.chain.from_iterable(batches):
            value = _without_empty(asdict(replace(one, record=None)))
            digest.update((separator + json.dumps(value, sort_keys=True, ensure_ascii=False)).encode())
            separator = ", "
            file.write(json.dumps({**value, "record": one.record}, default=str) + "\n")
        digest.update(b"]")

        def again() -> Batches:
            file.seek(0)
            while batch := [_conversation(json.loads(line)) for line in itertools.islice(file, _BATCH)]:
                yield batch

        yield Kept(digest.hexdigest(), again)


def _conversation(value: dict[str, Any]) -> Conversation:
    """From what `asdict` makes of one."""
    turns = [
        Turn(
            **{
                **turn,
                "calls": tuple(ToolCall(**call) for call in turn["calls"]),
                "images": tuple(turn.get("images", ())),
            }
        )
        for turn in value["turns"]
    ]
    images = tuple(value.get("images", ()))
    return Conversation(**{**value, "turns": tuple(turns), "tools": tuple(value["tools"]), "images": images})


_LATER = ("thought", "images", "pictures", "record")


def _without_empty(value: dict[str, Any]) -> dict[str, Any]:
    """Of fields that there were not always, and most have nothing in: so the digest is what it was before."""
    turns = [{name: item for name, item in turn.items() if name not in _LATER or item} for turn in value["turns"]]
    return {name: item for name, item in value.items() if name not in _LATER or item} | {"turns": turns}


def _find_placeholders(conversations: Iterable[Conversation]) -> tuple[list[tuple[int, int]], str]:
    """Number and line of the conversations whose texts hold something like {{name}}, and the first such thing."""
    found = [
        (one.number, one.line, match[0])
        for one in conversations
        if (match := _PLACEHOLDER.search("\n".join(turn.text for turn in one.turns)))
    ]
    return [(number, line) for number, line, _ in found], found[0][2] if found else ""


def find_example_prompt(conversations: Iterable[Conversation]) -> str:
    """The first question of one short line, or, of texts, the first words of one; empty where there is none.

    It will stand in the model card, so whatever may be a path or an address is passed over.
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
