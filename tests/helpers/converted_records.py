"""Records of a file as conversations, all at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from surefoot.data.formats import LAYOUTS, Conversation, Reader, conversations_of, each_row
from surefoot.data.sources.records import Row


def rows(*values: dict[str, Any]) -> list[Row]:
    """Records as rows of a file, ten lines each."""
    return [Row(number, 10 * number, value) for number, value in enumerate(values, start=1)]


def convert(rows: Iterable[Row], layout: str, name: str) -> list[Conversation]:
    """All rows, of a pair the better and then the worse. layout: a key of LAYOUTS. InputError lists the faulty rows."""
    return converted(rows, LAYOUTS[layout].read, name)


def converted(rows: Iterable[Row], read: Reader, name: str) -> list[Conversation]:
    """What `read` makes of the rows of the file `name`."""
    return list(itertools.chain.from_iterable(each_row(rows, lambda row: conversations_of(row, read), name)))
