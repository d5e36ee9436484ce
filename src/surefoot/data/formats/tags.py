"""Other names for role and content and for the roles themselves, as dataset_info.json gives them under `tags`.

A renaming and nothing else: the sharegpt format reads what comes out of it and never hears of tags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from surefoot.data.rows import Row

_TAG_FIELDS = {"role_tag": "from", "content_tag": "value"}
_TAG_ROLES = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def retag(rows: Iterable[Row], tags: Mapping[str, str]) -> Iterator[Row]:
    """Rows whose turns have sharegpt's own words. tags: role_tag, content_tag, user_tag, … -> the file's word. What has
    another word stays as it is, for the format to judge."""
    fields = {tags[tag]: ours for tag, ours in _TAG_FIELDS.items() if tag in tags}
    roles = {tags[tag]: ours for tag, ours in _TAG_ROLES.items() if tag in tags}
    for row in rows:
        if tags:
            row = replace(row, value={name: _turns(value, fields, roles) for name, value in row.value.items()})
        yield row


def _turns(value: Any, fields: Mapping[str, str], roles: Mapping[str, str]) -> Any:
    """A turn, or a list of turns, renamed; any other value as it is."""
    if isinstance(value, dict):
        return _turns([value], fields, roles)[0]
    if not isinstance(value, list) or not all(
        isinstance(item, dict) and fields.keys() <= item.keys() for item in value
    ):
        return value
    renamed = [{fields.get(name, name): part for name, part in item.items()} for item in value]
    return [item | {"from": roles.get(str(item["from"]), item["from"])} if "from" in item else item for item in renamed]
