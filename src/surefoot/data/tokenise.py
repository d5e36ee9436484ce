"""One data file: from its records to tokenised examples, or from the cache.

A file that was tokenised before in the same way needs its bytes hashed and nothing else. Records that a user's own
function reads are converted at every start: surefoot cannot know what the function does, only what came of it.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.data.cache import cache_key, open_cache, write_cache
from surefoot.data.dataset import TokenisedFile
from surefoot.data.encode import Encoded, Encoding, TrainOn, encode
from surefoot.data.encode_kinds import encode_judged, encode_pairs, encode_prompts
from surefoot.data.facts import SourceFacts, find_example_prompt, find_placeholders
from surefoot.data.formats import (
    Conversation,
    convert,
    convert_with,
    layout_of,
    retag,
    unused_fields,
)
from surefoot.data.kind import Kind, rows_per_item
from surefoot.data.rows import Source, parse_rows
from surefoot.data.segments import Template
from surefoot.data.templates import make_template, template_for_all, templates_to_try
from surefoot.data.text_encoder import TextEncoder
from surefoot.errors import Fault, InputError
from surefoot.families.templates import find_row

CUSTOM = "custom"
ReadRecord = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class Method:
    """How records become examples: the same for all files of a run. digest: of the tokenizer. chunks: plain texts only,
    and one that is too long becomes several examples. read_record: for files whose format is custom. fallbacks:
    templates for records that the first cannot write, where nobody asked for it. kind: what is learned from a record;
    for other kinds than answers, train_on, chunks and encoding have no meaning."""

    encoder: TextEncoder
    digest: str
    template: str
    template_asked: bool
    bos_id: int | None
    stop_ids: tuple[int, ...]
    max_length: int
    train_on: TrainOn
    chunks: bool = False
    read_record: ReadRecord | None = None
    fallbacks: tuple[str, ...] = ()
    encoding: Encoding = "parts"
    kind: Kind = "answers"

    def template_called(self, name: str) -> Template:
        """name: as the facts of a file have it. A template of the user's own may have had another name when cached."""
        return make_template(name if find_row(name) else self.template, self.encoder, self.stop_ids)


@dataclass(frozen=True)
class _Records:
    """What was read of a file. rows: how many it holds; used: the first so many of them, whose conversations follow."""

    rows: int
    used: int
    layout: str
    reason: str
    conversations: Sequence[Conversation]
    unused: tuple[str, ...]


def tokenise(source: Source, method: Method, limit: int | None, cache: Path) -> tuple[TokenisedFile, SourceFacts]:
    """The file's examples, which may be none, and what is known of them. limit: only the first so many records. cache:
    a folder. Raises InputError for anything wrong with the records."""
    records = _read(source, method, limit) if source.format == CUSTOM else None
    content = _digest({**source.identity, "limit": limit})
    if records is not None:
        content = _digest([asdict(conversation) for conversation in records.conversations])
    key = cache_key(
        {
            "content": content,
            "templates": [method.template_called(name).identity for name in (method.template, *method.fallbacks)],
            "template_asked": method.template_asked,
            "tokenizer": method.digest,
            "bos": method.bos_id,
            "stops": method.stop_ids,
            "max_length": method.max_length,
            "train_on": method.train_on,
            "chunks": method.chunks,
            "encoding": method.encoding,
            "kind": method.kind,
        }
    )
    folder = Path(cache) / "tokenised" / key
    found = open_cache(folder, source.name)
    if found is None:
        with _no_collector():
            found = _encode(source, records or _read(source, method, limit), method, folder)
    file, record = found
    return file, _facts(source, content, record)


@contextmanager
def _no_collector() -> Iterator[None]:
    """Inside, Python looks for no cycles. Records and examples have none and nearly all stay until the end, so that it
    finds nothing, in an eighth of the time that tokenising takes."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _read(source: Source, method: Method, limit: int | None) -> _Records:
    rows = parse_rows(source)
    used = retag(rows[:limit], source.tags)
    if source.format == CUSTOM:
        if method.read_record is None:
            what = "is custom, and nobody passed the function that reads a record"
            fix = "pass read_record from Python, or name a format"
            raise InputError(Fault("data.format", what, fix))
        conversations = convert_with(method.read_record, used, source.name, method.kind)
        layout = "text" if conversations[0].turns[0].role == "text" else CUSTOM
        records = _Records(len(rows), len(used), layout, "read by your function", conversations, ())
        return _checked(source, method, records)
    layout, reason = layout_of(method.kind, source.format, used, source.name, texts=method.chunks)
    if not source.only_columns:  # else its notes name them
        reason = "; ".join((reason, *(f"{own!r} read as {field!r}" for field, own in source.columns.items())))
    if layout == "prompt-completion" and isinstance(used[0].value.get("prompt"), str):
        reason += "; a pair of texts goes through the template"
    conversations = convert(used, layout, source.name)
    if layout == "preference" and method.kind == "answers":  # only where it is asked for: see `layout_of`
        conversations, reason = conversations[::2], f"{reason}; the better answers are learned"
    records = _Records(len(rows), len(used), layout, reason, conversations, unused_fields(used, layout))
    return _checked(source, method, records)


def _checked(source: Source, method: Method, records: _Records) -> _Records:
    if method.chunks:
        for one in records.conversations:
            if one.turns[0].role != "text":
                what = f"row {one.number}: is a conversation ({records.layout}), and pretraining learns plain texts"
                fix = "name the field that holds the text in the source's columns: {text: FIELD}, or choose stage: sft"
                raise InputError(Fault(f"{source.name}:{one.line}", what, fix))
    return records


def _encode(source: Source, records: _Records, method: Method, folder: Path) -> tuple[TokenisedFile, dict[str, Any]]:
    conversations = records.conversations
    template, examples, fault = _laid_out(conversations, method, source.name)
    is_kept = [_is_kept(example, method) for example in examples]
    several = any(sum(turn.role == "assistant" for turn in one.turns) > 1 for one in conversations)
    placeholders, placeholder = find_placeholders(conversations)
    record = {
        "layout": records.layout,
        "layout_reason": records.reason,
        "template": template.name,
        "template_fault": fault,
        "rows": records.rows,
        "used": records.used,
        "dropped": [
            [examples[place].number, examples[place].line]
            for place in range(0, len(examples), rows_per_item(method.kind))
            if not is_kept[place]
        ],
        "unused": list(records.unused),
        "notes": [*template.notes, *(template.dialogue_notes if several else ())],
        "placeholders": placeholders,
        "placeholder": placeholder,
        "example_prompt": find_example_prompt(conversations),
    }
    kept = list(itertools.compress(examples, is_kept))
    return write_cache(folder, source.name, kept, record, method.encoder.size)


def _is_kept(example: Encoded, method: Method) -> bool:
    """Both examples of a pair, or none."""
    return example.fits if method.kind == "prompts" else example.usable


def _laid_out(conversations: Sequence[Conversation], method: Method, name: str) -> tuple[Template, list[Encoded], str]:
    """The examples, by the first template that can write all records, and what hinders the one before all others."""
    refused: InputError | None = None
    for wanted in templates_to_try(method.template, method.template_asked, method.fallbacks, conversations):
        template = method.template_called(wanted)
        examples = _encoded(conversations, template, method, name)
        try:
            return template, list(examples), refused.faults[0].what if refused else ""
        except InputError as error:
            refused = refused or error
    assert refused is not None
    if other := template_for_all(conversations, name, method.encoder, method.stop_ids):
        fix = f"choose data.template {other}, which can write all records"
        raise InputError([fault if fault.where == name else replace(fault, fix=fix) for fault in refused.faults])
    raise refused


def _encoded(conversations: Sequence[Conversation], template: Template, method: Method, name: str) -> Iterator[Encoded]:
    if method.kind == "answers":
        return encode(
            conversations,
            template,
            method.encoder,
            bos_id=method.bos_id,
            max_length=method.max_length,
            train_on=method.train_on,
            name=name,
            chunks=method.chunks,
            encoding=method.encoding,
        )
    encode_kind = {"pairs": encode_pairs, "judged": encode_judged, "prompts": encode_prompts}[method.kind]
    how = {"bos_id": method.bos_id, "max_length": method.max_length, "name": name}
    return encode_kind(conversations, template, method.encoder, **how)


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


def _digest(value: Any) -> str:
    """Of plain JSON values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
