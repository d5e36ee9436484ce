"""A forecast for many GPUs as people read it, on a screen and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from surefoot.planning.scale import ScaleRow
from surefoot.system.messages import size_text

_COLUMNS = ("GPUs", "engine", "memory each", "fits", "tokens/step", "compute", "traffic", "tokens/s")


def scale_cells(row: ScaleRow) -> tuple[str, ...]:
    """One text for each column."""
    fits = "no" if not row.fits else "checkpointed" if row.checkpointing else "yes"
    rates = [f"{float(f'{rate:.3g}'):,.0f}" for rate in (row.slowest, row.fastest)] if row.fits else ["", ""]
    return (
        str(row.gpus),
        row.engine,
        size_text(row.memory),
        fits,
        f"{row.tokens:,}",
        _seconds(row.compute),
        _seconds(row.traffic),
        rates[0] if rates[0] == rates[1] else " to ".join(rates),
    )


def _seconds(value: float) -> str:
    """With the unit that shows it: a tiny model's step takes millionths of a second."""
    if value >= 0.1 or value == 0:
        return f"{value:.2f} s" if value else "none"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def scale_table(rows: Sequence[ScaleRow]) -> Table:
    """For `Console.show`. tokens/s: if no traffic hides behind compute, and if all of it does."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in _COLUMNS:
        table.add_column(name, no_wrap=True, justify="left" if name in ("engine", "fits") else "right")
    for row in rows:
        table.add_row(*scale_cells(row), style="" if row.fits else "dim")
    return table


def scale_markdown(rows: Sequence[ScaleRow]) -> str:
    """The same for a document."""
    lines = [_COLUMNS, tuple("---" for _ in _COLUMNS), *(scale_cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"
