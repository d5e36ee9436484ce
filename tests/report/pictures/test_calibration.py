"""The calibration of a reward model in the report: the last evaluation's, its points where the bins are."""

from __future__ import annotations

import pytest

from helpers.run_folders import eval_row, log_rows, write_run
from surefoot.report.html import write_report
from surefoot.report.pictures.calibration import calibration_picture, calibration_view, last_calibration
from surefoot.report.pictures.plots import png

SUMS = [[0.0, 0.0, 0.0]] * 4 + [[10.0, 5.0, 7.25], [30.0, 30.0, 22.9]] + [[0.0, 0.0, 0.0]] * 4


def test_points_stand_where_the_bins_are():
    view = calibration_view(7, SUMS)
    assert (view.step, view.pairs, len(view.points)) == (7, 40, 2)
    first, second = view.points
    assert first.text == "25.0% of pairs: 72.5% sure, 50.0% right"
    assert first.x < second.x
    assert first.y > second.y  # more often right is higher up
    assert second.radius > first.radius
    assert view.error == f"{0.25 * 0.225 + 0.75 * (1 - 22.9 / 30):.1%}"
    assert [row[0] for row in view.table.rows] == ["70% to 75%", "75% to 80%"]


def test_the_report_shows_that_of_the_last_evaluation(tmp_path):
    rows = [*log_rows(10), {**eval_row(10, 10, 0.5), "calibration": [[1.0, 1.0, 0.9]] * 10}]
    rows += [{**eval_row(20, 20, 0.4), "calibration": SUMS}]
    assert last_calibration(rows) == calibration_view(20, SUMS)
    run = write_run(tmp_path / "run", rows)
    page = write_report(run).read_text()
    assert "After step 20, on 40 pairs" in page
    assert page.count("<circle") == 2
    other = write_run(tmp_path / "other", log_rows(10))  # twin: a run without one
    assert "calibration-words" not in write_report(other).read_text()


def test_a_damaged_table_costs_the_section_and_no_more(tmp_path):
    run = write_run(tmp_path / "run", [*log_rows(10), {**eval_row(10, 10, 0.5), "calibration": [["x"]]}])
    page = write_report(run).read_text()
    assert "the calibration is left out" in page


def test_the_picture_is_drawn():
    assert png(calibration_picture(SUMS, "a model")).startswith(b"\x89PNG")


@pytest.mark.parametrize("sums", [[[0.0, 0.0, 0.0]] * 10])
def test_no_pairs_no_points(sums):
    assert calibration_view(1, sums).points == ()
