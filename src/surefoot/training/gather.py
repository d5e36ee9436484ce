"""What ranks have of a row of places, brought together on every rank.

Each place (an episode) belongs to one rank, which has some numbers for it. Afterwards all ranks have all of them, bit
for bit: others add zeros, and float64 holds ids and fp32 numbers exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

Totals = Callable[[Sequence[float]], list[float]]  # see `Engine.totals`


def gather_rows(own: Mapping[int, Sequence[float]], count: int, totals: Totals) -> list[list[float]]:
    """own: place (of `count`) -> this rank's numbers. Every rank must ask; a place that nobody has comes out empty."""
    lengths = [int(length) for length in totals([float(len(own.get(place, ()))) for place in range(count)])]
    flat: list[float] = []
    for place, length in enumerate(lengths):
        flat += own.get(place) or [0.0] * length
    flat = totals(flat)
    rows, start = [], 0
    for length in lengths:
        rows.append(flat[start : start + length])
        start += length
    return rows
