"""Accuracies on several sets as one table and one picture: what was measured, beside what others published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BLUE, _ORANGE, _GREEN, _GREY = "#0072B2", "#E69F00", "#009E73", "#666666"
_BARS = (_GREY, _BLUE)


@dataclass(frozen=True)
class Cell:
    """Shares from 0 to 1. error: standard error; interval: 95 %; None where not known. count: "143/200", or empty."""

    accuracy: float
    error: float | None = None
    count: str = ""
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class ScoreRow:
    """cells: by the heading of their column. average: over these columns, None where it means nothing. measured: here,
    not published. group: what the picture gives one colour."""

    name: str
    cells: Mapping[str, Cell]
    average: Cell | None
    measured: bool
    group: str = ""


def score_table(rows: Sequence[ScoreRow], headings: Sequence[str]) -> Table:
    """Per cent; of what was measured, the 95 % interval and the counts below."""
    table = Table(box=None, pad_edge=False)
    table.add_column("accuracy in %")
    averaged = all(row.average is not None for row in rows)
    for heading in (*headings, *(["avg" if len(headings) == 8 else f"avg of {len(headings)}"] if averaged else [])):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row.name, *map(_text, _cells(row, headings)), style="bold" if row.measured else "")
    return table


def _cells(row: ScoreRow, headings: Sequence[str]) -> list[Cell]:
    return [*(row.cells[heading] for heading in headings), *([] if row.average is None else [row.average])]


def _text(cell: Cell) -> str:
    lines = [f"{cell.accuracy:.1%}".removesuffix("%")]
    if cell.interval is not None:
        lines.append("–".join(f"{100 * end:.1f}" for end in cell.interval))
    return "\n".join([*lines, *([cell.count] if cell.count else [])])


def _reach(cell: Cell) -> tuple[float, float]:
    """How far the bar of error goes down and up, in per cent."""
    if cell.interval is None:
        return 100 * (cell.error or 0.0), 100 * (cell.error or 0.0)
    low, high = cell.interval
    return max(0.0, 100 * (cell.accuracy - low)), max(0.0, 100 * (high - cell.accuracy))


def draw_scores(rows: Sequence[ScoreRow], headings: Sequence[str], chance: Mapping[str, float], title: str) -> Figure:
    """Bars for what was measured, with their 95 % interval, or one standard error; points for what was published, one
    shade for each group;
    a dotted line where guessing would be, by heading."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    columns = [*headings, *(["average"] if rows[0].average is not None else [])]
    measured, published = [row for row in rows if row.measured], [row for row in rows if not row.measured]
    width = 0.55 / len(measured)
    for place, row in enumerate(measured):
        cells = _cells(row, headings)
        left = [column - 0.42 + width * (place + 0.5) for column in range(len(columns))]
        axes.bar(
            left,
            [100 * cell.accuracy for cell in cells],
            width=0.92 * width,
            yerr=list(zip(*map(_reach, cells), strict=True)),
            color=_BARS[place % 2] if len(measured) > 1 else _BLUE,
            error_kw={"elinewidth": 1, "capsize": 2},
            label=row.name,
        )
    shades = {"LoRA": (_ORANGE, "o"), "DoRA": (_GREEN, "D")}
    for group in dict.fromkeys(row.group for row in published):
        colour, marker = shades.get(group, (_GREY, "s"))
        of_group = [row for row in published if row.group == group]
        shift = 0.22 if group == "LoRA" else 0.34
        points = [
            (column + shift, 100 * cell.accuracy)
            for row in of_group
            for column, cell in enumerate(_cells(row, headings))
        ]
        x, y = zip(*points, strict=True)
        axes.plot(x, y, marker, color=colour, ms=4.5, alpha=0.75, mec="none", label=f"published, {group}")
    for column, heading in enumerate(headings):
        if (floor := chance.get(heading)) is not None:
            axes.hlines(100 * floor, column - 0.45, column + 0.45, color="black", linestyle=":", linewidth=1)
    if chance:
        axes.plot([], [], ":", color="black", linewidth=1, label="guessing")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_ylim(0, 100)
    axes.set_ylabel("accuracy (%)")
    axes.set_title(title, loc="left", fontsize=12)
    axes.grid(axis="y", alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    return figure
