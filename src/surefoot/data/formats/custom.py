"""Records that a user's own function reads: it says what a record means, and the rules of the formats hold for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.data.formats.conversation import Conversation
from surefoot.data.formats.fields import RowFault
from surefoot.data.formats.judgements import read_judged
from surefoot.data.formats.layouts import Reader, Record, read_text
from surefoot.data.formats.messages import read_messages
from surefoot.data.formats.prompts import read_prompt
from surefoot.data.formats.ranking import read_preference
from surefoot.data.kind import Kind

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
