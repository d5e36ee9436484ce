"""Tokenize one data file, or load it from the cache.

A file that was tokenized before with the same settings is only hashed. Records read by a user's function are converted
at every start: the cache key is a hash of the function's output, because its code may depend on anything.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.data.chat.templates import make_template, template_for_all, templates_to_try
from surefoot.data.formats import Conversation, RowFault
from surefoot.data.formats.reader import CUSTOM, Reading, each_row, reader_with
from surefoot.data.formats.spool import Batches, spooled
from surefoot.data.formats.supervised import ARGUMENTS
from surefoot.data.sources.records import Source, rows_per_item
from surefoot.data.tokenize.cache import Written, cache_key, open_cache, write_cache
from surefoot.data.tokenize.dataset import SourceFacts, TokenizedFile
from surefoot.data.tokenize.encode import Encoded, EncodeSettings, encode
from surefoot.data.tokenize.picture_processor import is_same, refuse_pictures, with_pictures
from surefoot.data.tokenize.segments import Template
from surefoot.families.template_row import Dialogue
from surefoot.families.templates import find_row
from surefoot.method_facts.methods import METHODS
from surefoot.system.errors import Fault, InputError

ReadRecord = Callable[[dict[str, Any]], Any]
Records = Callable[[], tuple[Reading, Batches]]
_WITHOUT_VARIABLES = f"{ARGUMENTS} of the records is not read: a named template has no variables"
_STAGES = " or ".join(name for name, method in METHODS.items() if method.pictures)


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings(EncodeSettings):
    """How records become examples; the same for all files of a run.

    digest: hash of the tokenizer.
    template_asked: the user named the template.
    stop_ids: tokens that end an answer, EOS first.
    fallbacks: templates to try if the first cannot render all records and the user named none.
    chunks: refuse records that are not plain texts.
    read_record: reader of records in the custom format.
    pictures: whether the method can train on pictures.
    after_prompt: refuse records of token ids that mark no prompt, because all of it would count as answer.
    """

    digest: str
    template: str
    template_asked: bool
    stop_ids: tuple[int, ...]
    fallbacks: tuple[str, ...] = ()
    read_record: ReadRecord | None = None
    pictures: bool = True
    after_prompt: bool = False

    @functools.cached_property
    def _made(self) -> dict[str, Template]:
        return {}

    @property
    def dialogues(self) -> bool:
        """Whether a dialogue that is one text is split into turns: not for a template that writes no marks between
        them."""
        row = find_row(self.template)
        return self.kind == "answers" or not (isinstance(row, Dialogue) and row.takes_text)

    def template_called(self, name: str) -> Template:
        """Return the template with this name, as stored in a file's facts. A name that is not built in means the user's
        own template, which may have had another path when the file was cached."""
        wanted = name if find_row(name) else self.template
        if wanted not in self._made:
            self._made[wanted] = make_template(wanted, self.encoder, self.stop_ids)
        return self._made[wanted]


def tokenize(
    source: Source, settings: TokenizeSettings, limit: int | None, cache: Path
) -> tuple[TokenizedFile, SourceFacts]:
    """Return the file's examples (possibly none) and facts about the file.

    limit: number of records to use, from the start of the file; None: all.
    cache: the cache folder.

    Raises InputError for anything wrong with the records.
    """
    with _open_records(source, settings, limit, Path(cache) / "pictures") as (content, records):
        key = cache_key(
            {
                "content": content,
                "templates": [
                    settings.template_called(name).identity for name in (settings.template, *settings.fallbacks)
                ],
                "template_asked": settings.template_asked,
                "tokenizer": settings.digest,
                "bos": settings.bos_id,
                "stops": settings.stop_ids,
                "max_length": settings.max_length,
                "train_on": settings.train_on,
                "chunks": settings.chunks,
                "encoding": settings.encoding,
                "kind": settings.kind,
                "processor": settings.processor and [settings.processor.identity, str(source.folder)],
                "after_prompt": settings.after_prompt,
                **({} if settings.dialogues else {"dialogues": False}),
            }
        )
        folder = Path(cache) / "tokenised" / key
        found = open_cache(folder, source.name)
        # Pictures are compared by size and modification time: hashing them all would make every start slow.
        if found is not None and all(map(is_same, found[0].all_pictures())):
            file, record, unkept = *found, ""
        else:
            with _gc_disabled():
                file, record, unkept = _encode(source, records, settings, folder)
        return file, replace(_facts(source, _with_files(content, file), record), unkept=unkept)


@contextmanager
def _open_records(
    source: Source, settings: TokenizeSettings, limit: int | None, pictures: Path
) -> Iterator[tuple[str, Records]]:
    """Yield a hash of the records, and a function that reads them from the start at each call.

    pictures: folder for pictures whose bytes are in a table.
    """
    how = {"texts_alone": settings.chunks, "dialogues": settings.dialogues, "pictures": pictures}
    if source.format != CUSTOM:

        def records() -> tuple[Reading, Batches]:
            reading = Reading(source, settings.kind, limit, **how)
            return reading, reading.batches()

        yield _digest({**source.identity, "limit": limit}), records
        return
    if settings.read_record is None:
        what = "is custom, but no function that reads a record was given"
        raise InputError(
            Fault(
                "data.format",
                what,
                "set functions.record (or pass read_record from Python), or choose a format",
                code="SF-OWN-FUNCTION",
            )
        )
    read = reader_with(settings.read_record, settings.kind)
    reading = Reading(source, settings.kind, limit, read=read, **how)
    with spooled(reading.batches()) as found:
        yield found.digest, lambda: (reading, found.again())


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable Python's garbage collector. Records and examples have no reference cycles, and the collector would take
    an eighth of the time of tokenizing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _encode(source: Source, records: Records, settings: TokenizeSettings, folder: Path) -> Written:
    """Encode the records with the first template that can render all of them, and write the cache."""
    reading, batches = records()
    first = next(batches)
    batches = itertools.chain([first], batches)
    refused: list[InputError] = []
    for wanted in templates_to_try(settings.template, settings.template_asked, settings.fallbacks, texts=reading.texts):
        if refused:
            reading, batches = records()
        template, dropped = settings.template_called(wanted), []
        examples = _examples(batches, template, settings, source, dropped)
        fault = refused[0].faults[0].what if refused else ""
        record = functools.partial(_record, reading, template, fault, dropped)
        try:
            return write_cache(folder, source.name, examples, record, settings.encoder.size)
        except _TemplateRefused as error:
            refused.append(error.why)
    if other := template_for_all(lambda: records()[1], settings.encoder, settings.stop_ids):
        fix = f"choose data.template: {other}, which can render all records"
        faults = refused[0].faults
        raise InputError([fault if fault.where == source.name else replace(fault, fix=fix) for fault in faults])
    raise refused[0]


class _TemplateRefused(Exception):
    """A template cannot render all records."""

    def __init__(self, why: InputError):
        super().__init__(str(why))
        self.why = why


def _examples(
    batches: Iterable[list[Conversation]],
    template: Template,
    settings: TokenizeSettings,
    source: Source,
    dropped: list[tuple[int, int]],
) -> Iterator[list[Encoded]]:
    """Yield the usable examples in batches.

    dropped: output; number and line of each record without a usable example are appended.

    Raises InputError for pictures that cannot be used, and _TemplateRefused, both after the last record, because faults
    of the records themselves take precedence.
    """
    why: InputError | _TemplateRefused | None = None
    name = source.name
    for batch in batches:
        if why is not None:
            continue
        try:
            seen = each_row(batch, functools.partial(_checked, source=source, settings=settings), name)
        except InputError as error:
            why = error
            continue
        try:
            examples = list(encode(seen, template, settings, name))
        except InputError as error:
            # Of token ids no template writes anything, so none would help.
            why = error if seen[0].tokens is not None else _TemplateRefused(error)
            continue
        is_kept = [_is_kept(example, settings) for example in examples]
        size = rows_per_item(settings.kind)
        items = zip(examples[::size], is_kept[::size], strict=True)
        dropped += [(one.number, one.line) for one, kept in items if not kept]
        yield list(itertools.compress(examples, is_kept))
    if why is not None:
        raise why


def _record(reading: Reading, template: Template, fault: str, dropped: list[tuple[int, int]]) -> dict[str, Any]:
    """Return the metadata stored in the cache with the examples. Call it after the last example was written.

    fault: why the first template could not be used.
    """
    return {
        "layout": reading.layout,
        "layout_reason": reading.reason,
        "template": template.name,
        "template_fault": fault,
        "rows": reading.rows,
        "used": reading.used,
        "dropped": [list(place) for place in dropped],
        "unused": list(reading.unused),
        "notes": [
            *template.notes,
            *(template.dialogue_notes if reading.several else ()),
            *((_WITHOUT_VARIABLES,) if reading.arguments and find_row(template.name) else ()),
        ],
        "placeholders": [list(place) for place in reading.placeholders],
        "placeholder": reading.placeholder,
        "example_prompt": reading.example_prompt,
    }


def _checked(conversation: Conversation, source: Source, settings: TokenizeSettings) -> Conversation:
    """Open the conversation's pictures. Raises RowFault for pictures that cannot be used, and for token ids that mark
    no prompt where the method needs one."""
    tokens, processor = conversation.tokens, settings.processor
    if settings.after_prompt and tokens is not None and all(tokens.learned):
        fix = "add labels, with -100 for the tokens of the prompt, or a completion_mask"
        raise RowFault("has token ids of which none is marked as prompt, so all of them would count as answer", fix)
    if not settings.pictures:
        return refuse_pictures(conversation, "this stage trains on text only", f"choose stage {_STAGES}")
    if settings.encoding == "whole":
        return refuse_pictures(conversation, "data.encoding is whole", "set data.encoding: parts")
    if processor is None:
        why = "surefoot cannot train this model on pictures"
        return refuse_pictures(conversation, why, "docs/images.md lists the supported models")
    return with_pictures(conversation, lambda path: processor.look(path, source.folder))


def _is_kept(example: Encoded, settings: TokenizeSettings) -> bool:
    """Whether the example is used. Both examples of a pair give the same answer."""
    return example.fits if settings.kind == "prompts" else example.usable


def _facts(source: Source, content: str, record: dict[str, Any]) -> SourceFacts:
    """Build the facts from the cached record. The file's name is not cached: another file may have the same content."""

    def places(name: str) -> tuple[tuple[str, int, int], ...]:
        return tuple((source.name, number, line) for number, line in record[name])

    return SourceFacts(
        file=source.name,
        sha256=source.sha256,
        content=content,
        layout=record["layout"],
        layout_reason="; ".join((record["layout_reason"], *source.notes)),
        template=record["template"],
        rows=record["rows"],
        used=record["used"],
        dropped=places("dropped"),
        unused=tuple(record["unused"]),
        notes=tuple(record["notes"]),
        placeholders=places("placeholders"),
        placeholder=record["placeholder"],
        commit=source.commit,
        template_fault=record["template_fault"],
        example_prompt=record["example_prompt"],
    )


def _with_files(content: str, file: TokenizedFile) -> str:
    """Return a hash of the records and of their picture files."""
    hashes = [picture.sha256 for picture in file.all_pictures()]
    return _digest([content, hashes]) if hashes else content


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
