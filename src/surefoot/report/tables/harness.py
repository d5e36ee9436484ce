"""What lm-evaluation-harness found, as a table: a row for each metric, a column for each side."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from surefoot.report.tables.scores import Cell


def harness_table(sides: Mapping[str, Mapping[str, Cell]]) -> Table:
    """sides: name -> metric -> value and standard error, as the harness gives them: shares from 0 to 1."""
    table = Table(box=None, pad_edge=False)
    table.add_column("task and metric")
    for side in sides:
        table.add_column(side, justify="right")
    for name in next(iter(sides.values())):
        table.add_row(name, *(_value(cells[name]) for cells in sides.values()))
    return table


def _value(cell: Cell) -> str:
    error = "" if cell.error is None else f" ± {cell.error:.4f}"
    return f"{cell.accuracy:.4f}{error}"
