"""Ways that fit, as lines of text: they follow a message or stand among a plan's cautions."""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.planning.ways import Way
from surefoot.system.messages import size_text

COLUMNS = ("GiB per GPU", "host", "tokens/s", "set")
_NOTHING = "nothing that was tried fits: a shorter data.max_length, a smaller model, or more GPUs may"


def way_cells(way: Way) -> tuple[str, ...]:
    """One text per column."""
    rate = f"~{float(f'{way.rate:.2g}'):,.0f}" if way.rate else "?"
    memory = way.plan.memory
    values = {key: f"{value:g}" if isinstance(value, float) else value for key, value in way.keys.items()}
    keys = " ".join(f"{key}={value}" for key, value in values.items())
    return f"{memory.total / 2**30:.1f}", size_text(memory.host) if memory.host else "", rate, keys


def way_lines(ways: Sequence[Way]) -> list[str]:
    """A heading and a line for each way; a sentence if there is none."""
    if not ways:
        return [_NOTHING]
    rows = [COLUMNS, *map(way_cells, ways)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS) - 1)]
    fits = "fits instead, cheapest first (GPU time per token; tokens/s are estimates, host is host memory):"
    return [
        fits,
        *(
            "  " + "  ".join([*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[-1]])
            for row in rows
        ),
    ]
