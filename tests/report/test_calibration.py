"""Confidence bins: they add up, and say by how much a model is too sure of itself.

The calibration of a reward model in the report: the last evaluation's, its points where the bins are.
"""

import base64
import math
import re

import pytest
import torch

from helpers.run_folders import eval_row, log_rows, write_run
from surefoot.report.calibration import (
    BINS,
    calibration_bins,
    calibration_error,
    calibration_picture,
    calibration_sums,
    calibration_view,
    last_calibration,
)
from surefoot.report.html import write_report

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


SUMS = [[0.0, 0.0, 0.0]] * 4 + [[10.0, 5.0, 7.25], [30.0, 30.0, 22.9]] + [[0.0, 0.0, 0.0]] * 4


def test_points_stand_where_the_bins_are():
    view = calibration_view(7, SUMS)
    assert (view.step, view.pairs) == (7, 40)
    assert base64.b64decode(view.picture).startswith(b"\x89PNG")
    assert view.error == f"{0.25 * 0.225 + 0.75 * (1 - 22.9 / 30):.1%}"
    assert [row[0] for row in view.table.rows] == ["70% to 75%", "75% to 80%"]
    (points,) = calibration_picture(SUMS, "a model").axes[0].collections
    assert points.get_offsets().tolist() == [[7.25 / 10, 0.5], [pytest.approx(22.9 / 30), 1.0]]
    first, second = points.get_sizes()
    assert second - 30 == pytest.approx(3 * (first - 30))  # areas are the shares, over a least one


def test_the_report_shows_that_of_the_last_evaluation(tmp_path):
    rows = [*log_rows(10), {**eval_row(10, 10, 0.5), "calibration": [[1.0, 1.0, 0.9]] * 10}]
    rows += [{**eval_row(20, 20, 0.4), "calibration": SUMS}]
    assert last_calibration(rows) == calibration_view(20, SUMS)
    run = write_run(tmp_path / "run", rows)
    page = write_report(run).read_text()
    assert f'src="data:image/png;base64,{calibration_view(20, SUMS).picture}"' in page
    other = write_run(tmp_path / "other", log_rows(10))  # twin: a run without one
    assert 'id="calibration-view"' not in write_report(other).read_text()


def test_a_damaged_table_costs_the_section_and_no_more(tmp_path):
    run = write_run(tmp_path / "run", [*log_rows(10), {**eval_row(10, 10, 0.5), "calibration": [["x"]]}])
    page = write_report(run).read_text()
    assert 'id="calibration-view"' not in page
    assert 'id="events"' in page
    assert re.search(r"\b(Type|Value)Error\b", page), "it says so"


def test_no_pairs_no_points():
    sums = [[0.0, 0.0, 0.0]] * 10
    assert calibration_view(1, sums).table.rows == ()
    (points,) = calibration_picture(sums, "a model").axes[0].collections
    assert len(points.get_offsets()) == 0
