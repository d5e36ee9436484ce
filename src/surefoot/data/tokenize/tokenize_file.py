"""One data file: from its records to tokenised examples, or from the cache.

A file that was tokenised before in the same way needs its bytes hashed and nothing else. Records that a user's own
function reads are converted at every start: surefoot cannot know what the function does, only what came of it.
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
from surefoot.data.formats import Conversation, each_row
from surefoot.data.formats.reader import CUSTOM, Batches, Reading, kept, reader_with
from surefoot.data.sources.records import Source, rows_per_item
from surefoot.data.tokenize.cache import Written, cache_key, open_cache, write_cache
from surefoot.data.tokenize.dataset import SourceFacts, TokenisedFile
from surefoot.data.tokenize.encode import Encoded, EncodeSettings, encode
from surefoot.data.tokenize.segments import Template
from surefoot.data.tokenize.sight import is_same, refuse_pictures, with_pictures
from surefoot.families.templates import find_row
from surefoot.method_facts.methods import METHODS
from surefoot.system.errors import Fault, InputError

ReadRecord = Callable[[dict[str, Any]], Any]
Records = Callable[[], tuple[Reading, Batches]]
_STAGES = " or ".join(name for name, method in METHODS.items() if method.pictures)


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings(EncodeSettings):
    """How records become examples: the same for all files of a run.

    digest: of the tokenizer.
    template_asked: the user named it.
    fallbacks: templates for records that the first cannot write, where nobody asked for it.
    chunks: plain texts only; other records are refused.
    read_record: for files whose format is custom.
    pictures: the method learns them.
    """

    digest: str
    template: str
    template_asked: bool
    stop_ids: tuple[int, ...]
    fallbacks: tuple[str, ...] = ()
    read_record: ReadRecord | None = None
    pictures: bool = True

    def template_called(self, name: str) -> Template:
        """name: as the facts of a file have it. A template of the user's own may have had another name when cached."""
        return make_template(name if find_row(name) else self.template, self.encoder, self.stop_ids)


def tokenise(
    source: Source, settings: TokenizeSettings, limit: int | None, cache: Path
) -> tuple[TokenisedFile, SourceFacts]:
    """The file's examples, which may be none, and what is known of them.

    limit: only the first so many records.
    cache: a folder.

    Raises InputError for anything wrong with the records.
    """
    with _opened(source, settings, limit, Path(cache) / "pictures") as (content, records):
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
                "sight": settings.sight and [settings.sight.identity, str(source.folder)],
            }
        )
        folder = Path(cache) / "tokenised" / key
        found = open_cache(folder, source.name)
        # Pictures by size and time: to hash them all again would make every start as slow as the first.
        if found is not None and all(map(is_same, found[0].all_pictures())):
            file, record, unkept = *found, ""
        else:
            with _no_collector():
                file, record, unkept = _encode(source, records, settings, folder)
        return file, replace(_facts(source, _with_files(content, file), record), unkept=unkept)


@contextmanager
def _opened(
    source: Source, settings: TokenizeSettings, limit: int | None, pictures: Path
) -> Iterator[tuple[str, Records]]:
    """The digest of what the records are, and a function that opens them anew at each call. pictures: see `Reading`."""
    how = {"texts_alone": settings.chunks, "pictures": pictures}
    if source.format != CUSTOM:

        def records() -> tuple[Reading, Batches]:
            reading = Reading(source, settings.kind, limit, **how)
            return reading, reading.batches()

        yield _digest({**source.identity, "limit": limit}), records
        return
    if settings.read_record is None:
        what = "is custom, and nobody passed the function that reads a record"
        raise InputError(
            Fault(
                "data.format",
                what,
                "name functions.record (or pass read_record from Python), or name a format",
                code="SF-OWN-FUNCTION",
            )
        )
    read = reader_with(settings.read_record, settings.kind)
    reading = Reading(source, settings.kind, limit, read=read, **how)
    with kept(reading.batches()) as found:
        yield found.digest, lambda: (reading, found.again())


@contextmanager
def _no_collector() -> Iterator[None]:
    """Inside, Python looks for no cycles. Records and examples have none, so it would find nothing, in an eighth of the
    time that tokenising takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _encode(source: Source, records: Records, settings: TokenizeSettings, folder: Path) -> Written:
    """The examples, by the first template that can write all records, what is to be known of them, and why they are not
    kept: see `write_cache`."""
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
        except _Unwritten as error:
            refused.append(error.why)
    if other := template_for_all(lambda: records()[1], settings.encoder, settings.stop_ids):
        fix = f"choose data.template {other}, which can write all records"
        faults = refused[0].faults
        raise InputError([fault if fault.where == source.name else replace(fault, fix=fix) for fault in faults])
    raise refused[0]


class _Unwritten(Exception):
    """A template cannot write all records."""

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
    """Those that are kept, some at a time.

    dropped: gets number and line of the others' records.

    Raises _Unwritten at the end: what is wrong with the records, whatever the template, goes before.
    """
    why: InputError | None = None
    name = source.name
    for batch in batches:
        if why is not None:
            continue
        try:
            seen = each_row(batch, functools.partial(_seen, source=source, settings=settings), name)
            examples = list(encode(seen, template, settings, name))
        except InputError as error:
            why = error
            continue
        is_kept = [_is_kept(example, settings) for example in examples]
        size = rows_per_item(settings.kind)
        items = zip(examples[::size], is_kept[::size], strict=True)
        dropped += [(one.number, one.line) for one, kept in items if not kept]
        yield list(itertools.compress(examples, is_kept))
    if why is not None:
        raise _Unwritten(why)


def _record(reading: Reading, template: Template, fault: str, dropped: list[tuple[int, int]]) -> dict[str, Any]:
    """What stands in the cache beside the examples, once all of them were written.

    fault: what hindered the template that was wanted before all others.
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
        "notes": [*template.notes, *(template.dialogue_notes if reading.several else ())],
        "placeholders": [list(place) for place in reading.placeholders],
        "placeholder": reading.placeholder,
        "example_prompt": reading.example_prompt,
    }


def _seen(conversation: Conversation, source: Source, settings: TokenizeSettings) -> Conversation:
    """The conversation with its pictures looked at. Raises RowFault for those that cannot be learned."""
    sight = settings.sight
    if not settings.pictures:
        return refuse_pictures(conversation, "this stage learns texts", f"choose stage {_STAGES}")
    if settings.encoding == "whole":
        return refuse_pictures(conversation, "data.encoding is whole", "set data.encoding: parts")
    if sight is None:
        why = "the model is not one whose pictures surefoot learns"
        return refuse_pictures(conversation, why, "docs/images.md lists those that are")
    return with_pictures(conversation, lambda path: sight.look(path, source.folder))


def _is_kept(example: Encoded, settings: TokenizeSettings) -> bool:
    """Both examples of a pair, or none."""
    return example.fits if settings.kind == "prompts" else example.usable


def _facts(source: Source, content: str, record: dict[str, Any]) -> SourceFacts:
    """The file's name is not part of the cache: the same content may lie elsewhere."""

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


def _with_files(content: str, file: TokenisedFile) -> str:
    """The digest of records and of their pictures' files."""
    hashes = [picture.sha256 for picture in file.all_pictures()]
    return _digest([content, hashes]) if hashes else content


def _digest(value: Any) -> str:
    """Of plain JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
