"""Keep conversations in a temporary file, for records that a user's function reads: it is called once per record."""

from __future__ import annotations

import hashlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from surefoot.data.formats import Conversation, ToolCall, Turn

Batches = Iterator[list[Conversation]]
BATCH = 1024  # conversations per batch


@dataclass(frozen=True)
class Spooled:
    """Conversations stored in a temporary file.

    digest: hash of all conversations.
    again: read all of them from the start.
    """

    digest: str
    again: Callable[[], Batches]


@contextmanager
def spooled(batches: Batches) -> Iterator[Spooled]:
    """Store conversations in a temporary file, which is deleted when the block ends. A user's function is called only
    once per record, because it may return something else the next time."""
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
            while batch := [_conversation(json.loads(line)) for line in itertools.islice(file, BATCH)]:
                yield batch

        yield Spooled(digest.hexdigest(), again)


def _conversation(value: dict[str, Any]) -> Conversation:
    """Rebuild a conversation from its `asdict` form."""
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


_LATER = ("thought", "images", "pictures", "record", "arguments")  # fields added later


def _without_empty(value: dict[str, Any]) -> dict[str, Any]:
    """Remove empty fields that older versions did not have, so that digests stay the same."""
    turns = [{name: item for name, item in turn.items() if name not in _LATER or item} for turn in value["turns"]]
    return {name: item for name, item in value.items() if name not in _LATER or item} | {"turns": turns}
