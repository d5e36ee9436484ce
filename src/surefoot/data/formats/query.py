"""Record formats of ms-swift: its query-response form, and its pairs.

    query-response  {"query", "response"}, optionally with "system" and "history"
    text            a lone answer in {"messages"}
    swift-pairs     {"query", "response", "rejected_response"}; or {"messages"} with that or "rejected_messages"

Its other records are those of `messages` and `alpaca`. Facts: "Custom Dataset" in the documentation of ms-swift 4
(August 2026).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.data.formats.conversation import Conversation, RowFault, Turn, field, filled, listed
from surefoot.data.formats.preference import read_preference
from surefoot.data.formats.supervised import read_query

QUERY = ("query", "response")
REJECTED = ("rejected_response", "rejected_messages")
_MESSAGES = "messages"


def read_query_response(record: Mapping[str, Any]) -> Conversation:
    """Read {"query", "response"}, optionally with "system" and "history" as in alpaca records."""
    return Conversation((*read_query(record), Turn("assistant", filled(record, "response"))))


def is_lone_answer(record: Mapping[str, Any]) -> bool:
    """Whether `messages` holds an answer and nothing else, which is how ms-swift writes texts for pretraining."""
    match record.get(_MESSAGES):
        case [{"role": "assistant"}]:
            return True
        case _:
            return False


def is_swift_pair(record: Mapping[str, Any]) -> bool:
    return any(record.get(name) is not None for name in REJECTED)


def read_swift_pair(record: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    """Read a pair as the better and the worse conversation."""
    return read_preference(as_preference(record))


def as_preference(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the pair as a record of the `preference` format. `rejected_response`, a text or a list of messages, takes
    the place of what follows the last question."""
    if "rejected_images" in record and record["rejected_images"] != record.get("images"):
        raise RowFault("has other pictures in 'rejected_images'", "both answers of a pair are to one prompt")
    name = next(name for name in REJECTED if record.get(name) is not None)
    rejected = record[name]
    rest = {own: value for own, value in record.items() if own not in (*QUERY, *REJECTED, _MESSAGES)}
    if record.get(_MESSAGES) is None:
        return {**rest, "query": field(record, "query"), "chosen": field(record, "response"), "rejected": rejected}
    messages = record[_MESSAGES]
    if name == "rejected_response" and isinstance(messages, list):
        asked = [place for place, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user"]
        if not asked:
            raise RowFault(f"has no user turn in {listed([_MESSAGES])}, whose answer was rejected")
        answer = [{"role": "assistant", "content": rejected}] if isinstance(rejected, str) else rejected
        rejected = messages[: asked[-1] + 1] + answer if isinstance(answer, list) else answer
    return {**rest, "chosen": messages, "rejected": rejected}
