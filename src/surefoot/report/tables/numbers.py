"""Tables of measured numbers on the screen: four digits each, a dash where nothing was measured."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_NUMBER = 9  # characters of one in four digits, 0.0001234
_COUNTS = 3  # first columns, which may be narrower: a name and counts


def number_table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> Table:
    """left: columns that hold words; the first one is never wrapped. Where the screen is narrow, numbers stay whole."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for place, head in enumerate(heads):
        justify = "left" if place in left else "right"
        least = _NUMBER if place >= _COUNTS else None
        table.add_column(head, justify=justify, overflow="fold", no_wrap=place == 0, min_width=least)
    for row in rows:
        table.add_row(*row)
    return table


def four_digits(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def mean_of_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
