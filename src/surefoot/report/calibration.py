"""Calibration of a reward model: its confidence compared with how often it is right, as numbers and as a picture.

A margin m between two scores means that the answer with the higher score is better with probability sigmoid(|m|), which
is between 0.5 and 1. Pairs are sorted into bins by that confidence; a calibrated model is right in each bin as often as
its confidence says (Guo et al. 2017, arXiv 1706.04599). The expected calibration error is the mean gap over all pairs:

    ECE = sum over bins of  n_bin / n * |share right - mean confidence|

The sums are additive over batches; their columns are the number of pairs, of right pairs, and the sum of confidences.
The picture has one point per bin, on the diagonal if the two agree; a point's area is the bin's share of all pairs.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefoot.report.pictures.plots import finish_axes, png
from surefoot.report.trainer_log import Row
from surefoot.report.views import Table

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure


BINS = 10
CALIBRATION = "calibration"
Sums = Sequence[Sequence[float]]  # [BINS][pairs, right, confidence]; may be divided by a common weight


@dataclass(frozen=True)
class Bin:
    """Pairs of similar confidence.

    low, high: bounds of the confidence.
    share: share of all pairs.
    right, confidence: means over the bin's pairs.
    """

    low: float
    high: float
    share: float
    right: float
    confidence: float


def calibration_sums(margin: torch.Tensor) -> torch.Tensor:
    """Return the number of pairs, of right pairs, and the sum of confidences per bin.

    margin: [P], the better answer's score minus the worse one's -> [BINS, 3] float64. Equal scores count as half right.
        A NaN margin is in no bin; the loss reports it.
    """
    import torch

    margin = margin[~margin.isnan()]
    confidence = torch.sigmoid(margin.abs().double())
    place = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    columns = torch.stack((torch.ones_like(confidence), right(margin).double(), confidence), dim=1)
    return torch.zeros(BINS, 3, dtype=torch.float64, device=margin.device).index_add(0, place, columns)


def right(margin: torch.Tensor) -> torch.Tensor:
    """[P]: 1 where the better answer has the higher score, 0.5 where the scores are equal (chance), else 0."""
    return (margin.sign() + 1) / 2


def calibration_bins(sums: Sums) -> list[Bin]:
    """The non-empty bins, in order."""
    total = sum(pairs for pairs, _, _ in sums)
    width = 0.5 / len(sums)
    return [
        Bin(0.5 + number * width, 0.5 + (number + 1) * width, pairs / total, right / pairs, confidence / pairs)
        for number, (pairs, right, confidence) in enumerate(sums)
        if pairs
    ]


def calibration_error(sums: Sums) -> float:
    """The expected calibration error, between 0 and 1."""
    return sum(one.share * abs(one.right - one.confidence) for one in calibration_bins(sums))


@dataclass(frozen=True)
class Calibration:
    """The calibration of an evaluation for the report.

    error: the expected calibration error.
    picture: a PNG in base64.
    words: a description of the picture for readers who do not see it.
    table: the bins as numbers.
    """

    step: int
    pairs: int
    error: str
    picture: str
    words: str
    table: Table


def last_calibration(rows: Sequence[Row]) -> Calibration | None:
    """Return the calibration of the last evaluation, None if there is none."""
    row = next((row for row in reversed(rows) if row.get(CALIBRATION)), None)
    return None if row is None else calibration_view(row["current_steps"], row[CALIBRATION])


def calibration_view(step: int, sums: Sums) -> Calibration:
    bins = calibration_bins(sums)
    return Calibration(
        step=step,
        pairs=round(sum(pairs for pairs, _, _ in sums)),
        error=f"{calibration_error(sums):.1%}",
        picture=base64.b64encode(png(calibration_picture(sums, "Calibration"))).decode(),
        words=". ".join(map(in_words, bins)),
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
    """Draw one point per bin whose area is the bin's share of all pairs."""
    from matplotlib.figure import Figure

    bins = calibration_bins(sums)
    figure = Figure(figsize=(6.4, 4.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0.5, 1], [0.5, 1], color="#5a6575", linewidth=1.2, linestyle="--", label="perfectly calibrated")
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
    confidence = "confidence: sigmoid of the difference between the scores"
    finish_axes(axes, title, confidence, "share of pairs ranked right")
    axes.set_xlim(0.48, 1.02)
    axes.set_ylim(-0.05, 1.05)
    axes.xaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axes.yaxis.set_major_formatter(lambda value, place: f"{value:.0%}")
    axes.legend(frameon=False, fontsize=9, loc="lower right", markerscale=0.5)
    return figure
