"""Many things in a sentence: the first few names and how many more, or their number with the right word."""

from __future__ import annotations

from collections.abc import Sequence


def first_few(names: Sequence[object], most: int) -> str:
    """`3, 17, 20 and 5 more`."""
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def counted(number: int, noun: str) -> str:
    """`1 step`, `1,200 steps`. noun: one whose plural takes an s."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def was(number: int) -> str:
    """The verb behind `counted`."""
    return "was" if number == 1 else "were"
