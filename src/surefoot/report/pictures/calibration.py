"""How far a reward model's confidence may be believed, as a picture: for the report, and as a PNG file.

A point per bin: how sure the model was against how often it was right; on the diagonal the two agree. Its area is the
bin's share of all pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.report.calibration import CALIBRATION, Bin, Sums, calibration_bins, calibration_error
from surefoot.report.rows import Row
from surefoot.report.views import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LEFT, _TOP, _WIDTH, _HEIGHT = 52.0, 16.0, 340.0, 226.0  # of the drawing, in units of its view box
_LARGEST = 13.0  # radius of a bin that holds all pairs
_SMALLEST = 2.5


@dataclass(frozen=True)
class Point:
    """In units of the view box. text: the bin in words."""

    x: float
    y: float
    radius: float
    text: str


@dataclass(frozen=True)
class Calibration:
    """points: of the drawing. ticks: place and label, along x and along y. table: the bins as numbers."""

    step: int
    pairs: int
    error: str
    points: tuple[Point, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    diagonal: tuple[float, float, float, float]
    table: Table


def last_calibration(rows: Sequence[Row]) -> Calibration | None:
    """That of the last evaluation; None where none was made."""
    row = next((row for row in reversed(rows) if row.get(CALIBRATION)), None)
    return None if row is None else calibration_view(row["current_steps"], row[CALIBRATION])


def calibration_view(step: int, sums: Sums) -> Calibration:
    bins = calibration_bins(sums)
    points = tuple(Point(_x(one.confidence), _y(one.right), _radius(one.share), in_words(one)) for one in bins)
    return Calibration(
        step=step,
        pairs=round(sum(pairs for pairs, _, _ in sums)),
        error=f"{calibration_error(sums):.1%}",
        points=points,
        across=tuple((_x(value), f"{value:.0%}") for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)),
        up=tuple((_y(value), f"{value:.0%}") for value in (0.0, 0.25, 0.5, 0.75, 1.0)),
        diagonal=(_x(0.5), _y(0.5), _x(1.0), _y(1.0)),
        table=bins_table(bins),
    )


def bins_table(bins: Sequence[Bin]) -> Table:
    columns = ("confidence", "pairs", "mean confidence", "right")
    rows = tuple(
        (f"{one.low:.0%} to {one.high:.0%}", f"{one.share:.1%}", f"{one.confidence:.1%}", f"{one.right:.1%}")
        for one in bins
    )
    return Table(columns, rows, numeric=True)


def in_words(one: Bin) -> str:
    return f"{one.share:.1%} of pairs: {one.confidence:.1%} sure, {one.right:.1%} right"


def calibration_picture(sums: Sums, title: str) -> Figure:
    """The same for a file."""
    from matplotlib.figure import Figure

    bins = calibration_bins(sums)
    figure = Figure(figsize=(6.4, 4.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0.5, 1], [0.5, 1], color="#5a6575", linewidth=1.2, linestyle="--", label="as sure as it is right")
    axes.plot([one.confidence for one in bins], [one.right for one in bins], color="#56B4E9", linewidth=1.2)
    sizes = [30 + 400 * one.share for one in bins]
    axes.scatter(
        [one.confidence for one in bins],
        [one.right for one in bins],
        s=sizes,
        color="#0072B2",
        zorder=3,
        label="pairs (area: their share)",
    )
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("confidence: sigmoid of the difference between the scores")
    axes.set_ylabel("share of pairs ranked right")
    axes.set_xlim(0.48, 1.02)
    axes.set_ylim(-0.05, 1.05)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axes.grid(color="#edf0f3")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="lower right", markerscale=0.5)
    return figure


def _x(confidence: float) -> float:
    return round(_LEFT + (confidence - 0.5) * 2 * _WIDTH, 1)


def _y(share: float) -> float:
    return round(_TOP + (1 - share) * _HEIGHT, 1)


def _radius(share: float) -> float:
    return round(max(_SMALLEST, _LARGEST * share**0.5), 1)
