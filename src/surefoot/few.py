"""Many names in a sentence: the first few, and how many more."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(names: Sequence[object], most: int) -> str:
    """`3, 17, 20 and 5 more`."""
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown
