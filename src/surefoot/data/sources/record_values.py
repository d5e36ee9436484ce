"""Values of one record: what kind they are, and texts made of several."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import nearest_words

_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def kind_of(value: Any) -> str:
    """Describe the type of a JSON value for messages."""
    return "an empty list" if value == [] else _KINDS[type(value)]


_SLOT = re.compile(r"\{\{\s*([^{}]+?)\s*\}\}")


def composed(text: str, value: Mapping[str, Any], where: str) -> str:
    """Put the record's columns in the places of a text: {{COLUMN}}, or {{COLUMN.KEY}} and {{COLUMN.0}} for what a
    column holds. Raises InputError for a place without a text in this record.

    where: place of the record.
    """
    places = iter(slots(text, value))

    def part(slot: re.Match[str]) -> str:
        name, keys = next(places)
        found = value.get(name)
        for key in keys:
            if isinstance(found, list):
                found = found[int(key)] if key.isdecimal() and int(key) < len(found) else None
            else:
                found = found.get(key) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found
        near = nearest_words(name, list(value), 1) if name not in value else []
        what = f"has {'nothing' if found is None else kind_of(found)} in {slot[1]!r}, where compose needs a text"
        fix = f"did you mean {near[0]!r}?" if near else "fill it in, remove the record, or name another column"
        raise InputError(Fault(where, what, fix, code="SF-DATA-ROW"))

    return _SLOT.sub(part, text)


def slots(text: str, value: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the column of each place in a text, and the keys into it. A column's own name may have dots."""
    names = [slot[1] for slot in _SLOT.finditer(text)]
    return [(name, []) if name in value else (name.split(".")[0], name.split(".")[1:]) for name in names]
