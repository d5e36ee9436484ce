"""The parts of a split that `datasets` reads from a text such as `train[:100]`."""

from __future__ import annotations

import re

from surefoot.interop.rows import Refusal

_FIRST = re.compile(r"(\w+)\[:(\d+)\]")
_FIX = "give the number of records, as in train[:1000]; the data.eval of surefoot's config holds a share out"


def first_of(split: str) -> tuple[str, int | None]:
    """(name, how many records from the first on; None: all). Raises Refusal for any other part: what a percentage or an
    end comes to depends on how many records there are, and surefoot reads the first so many."""
    if found := _FIRST.fullmatch(split):
        return found[1], int(found[2])
    if not split.isidentifier():
        raise Refusal(f"takes the part {split!r}", _FIX)
    return split, None
