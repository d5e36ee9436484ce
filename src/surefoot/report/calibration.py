"""Does a reward model know how sure it may be? Its confidence against how often it is right.

A margin m between two scores says that the answer with the higher one is the better with probability sigmoid(|m|),
which is between 0.5 and 1. Pairs are sorted into bins by that confidence; a calibrated model is right in each bin as
often as it says (Guo et al. 2017, arXiv 1706.04599). The expected calibration error is the mean gap over all pairs:

    ECE = sum over bins of  n_bin / n * |share right - mean confidence|

The table adds up over batches: columns are pairs, right ones, and the sum of their confidences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch is not needed to read a table
    import torch

BINS = 10
CALIBRATION = "calibration"
Sums = Sequence[Sequence[float]]  # [BINS][pairs, right, confidence]; may be divided by a common weight


@dataclass(frozen=True)
class Bin:
    """low, high: confidences. share: of all pairs. right, confidence: means over the bin's pairs."""

    low: float
    high: float
    share: float
    right: float
    confidence: float


def calibration_sums(margin: torch.Tensor) -> torch.Tensor:
    """margin: [P], the better answer's score less the worse one's -> [BINS, 3] float64. Equal scores are half right. A
    margin that is not a number is in no bin: the loss tells of it."""
    import torch

    margin = margin[~margin.isnan()]
    confidence = torch.sigmoid(margin.abs().double())
    place = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    columns = torch.stack((torch.ones_like(confidence), right(margin).double(), confidence), dim=1)
    return torch.zeros(BINS, 3, dtype=torch.float64, device=margin.device).index_add(0, place, columns)


def right(margin: torch.Tensor) -> torch.Tensor:
    """[P]: 1 where the better answer has the higher score, a half where both have the same, as of chance, else 0."""
    return (margin.sign() + 1) / 2


def calibration_bins(sums: Sums) -> list[Bin]:
    """The bins that hold pairs, in order."""
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
