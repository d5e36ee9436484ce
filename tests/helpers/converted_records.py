"""Convert records of a file to conversations, all at once."""

import itertools
from collections.abc import Iterable
from typing import Any

from surefoot.data.formats import LAYOUTS, Conversation, Reader, conversations_of
from surefoot.data.formats.reader import each_row
from surefoot.data.sources.records import Row


def rows(*values: dict[str, Any]) -> list[Row]:
    """Return records as rows of a file, ten lines apart."""
    return [Row(number, 10 * number, value) for number, value in enumerate(values, start=1)]


def convert(rows: Iterable[Row], layout: str, name: str) -> list[Conversation]:
    """Convert all rows; of a pair first the better answer, then the worse. Raises InputError listing the invalid rows.

    layout: a key of LAYOUTS.
    """
    return converted(rows, LAYOUTS[layout].read, name)


def converted(rows: Iterable[Row], read: Reader, name: str) -> list[Conversation]:
    """Return what `read` makes of the rows of the file `name`."""
    return list(itertools.chain.from_iterable(each_row(rows, lambda row: conversations_of(row, read), name)))
