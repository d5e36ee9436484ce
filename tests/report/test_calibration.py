"""Confidence bins: they add up, and say by how much a model is too sure of itself."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.report.calibration import BINS, calibration_bins, calibration_error, calibration_sums

EXACT = 1e-12  # float64, a handful of operations


def logit(probability: float) -> float:
    return math.log(probability / (1 - probability))


def test_pairs_fall_into_the_bin_of_their_confidence():
    margins = torch.tensor([logit(0.52), -logit(0.53), logit(0.97), 40.0, 0.0], dtype=torch.float64)
    sums = calibration_sums(margins).tolist()
    assert len(sums) == BINS
    assert [row[0] for row in sums] == [3, 0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert [row[1] for row in sums] == [1.5, 0, 0, 0, 0, 0, 0, 0, 0, 2]  # an equal score is half right
    assert sums[0][2] == pytest.approx(0.52 + 0.53 + 0.5, rel=EXACT)
    first, last = calibration_bins(sums)
    assert (first.low, first.high, first.share) == (0.5, 0.55, 0.6)
    assert last.right == 1


def test_batches_add_up():
    torch.manual_seed(0)
    margins = torch.randn(50, dtype=torch.float64)
    together = calibration_sums(margins)
    parts = sum(calibration_sums(part) for part in margins.split(7))
    assert torch.allclose(together, parts, rtol=EXACT)


def test_the_error_is_the_mean_gap():
    """Eight pairs at 75 % of which six are right: none. The same where four are right: 25 points."""
    margins = [logit(0.751)] * 6 + [-logit(0.751)] * 2
    assert calibration_error(calibration_sums(torch.tensor(margins)).tolist()) == pytest.approx(0.001, abs=1e-6)
    half = [logit(0.751)] * 4 + [-logit(0.751)] * 4
    assert calibration_error(calibration_sums(torch.tensor(half)).tolist()) == pytest.approx(0.251, abs=1e-6)
    scaled = [[value / 8 for value in row] for row in calibration_sums(torch.tensor(half)).tolist()]
    assert calibration_error(scaled) == pytest.approx(0.251, abs=1e-6)


def test_a_margin_that_is_not_a_number_is_in_no_bin():
    table = calibration_sums(torch.tensor([2.0, float("nan")]))
    assert torch.equal(table, calibration_sums(torch.tensor([2.0])))
    assert not calibration_bins(calibration_sums(torch.tensor([float("nan")])).tolist())
