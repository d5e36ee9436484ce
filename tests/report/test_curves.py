"""Rows as curves: what is not finite is a gap, and thinning loses no spike."""

import json

import pytest

from helpers.faults import gives
from helpers.run_folders import log_rows, train_row
from surefoot.report import curves
from surefoot.report.curves import charts_of, described, thin, thinned, to_json, without_still
from surefoot.report.pictures.plots import evaluates_rewards, smooth


def lines(rows):
    return {line.name: line.points for chart in charts_of(rows) for line in chart.lines}


def test_every_quantity_has_its_curve():
    assert [chart.key for chart in charts_of(log_rows(20))] == [
        "loss",
        "accuracy",
        "lr",
        "grad_norm",
        "throughput",
        "memory",
    ]
    found = lines(log_rows(40))
    assert found["training"][4] == (5, 1.0)
    assert [step for step, _ in found["evaluation"]] == [10, 20, 30, 40]
    assert found["training, smoothed"] == tuple(
        zip(range(1, 41), smooth([v for _, v in found["training"]]), strict=True)
    )


def test_a_metric_gets_a_curve_of_its_own():
    rows = [{"current_steps": step, "eval_loss": 1.0, "eval_exact_match": 0.1 * step} for step in (1, 2)]
    assert [chart.key for chart in charts_of(rows)] == ["loss", "eval_exact_match"]


def test_what_is_not_finite_is_a_gap_and_never_a_number():
    found = lines(log_rows(40, bad=(7,)))
    assert found["training"][6] == found["training, smoothed"][6] == (7, None)
    assert None not in [value for step, value in found["training"] if step != 7]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", True, None, [1]])
def test_whatever_a_damaged_row_holds_is_a_gap(value):
    rows = [*log_rows(3), train_row(4, 9, 1.0) | {"loss": value}]
    assert lines(rows)["training"][-1] == (4, None)


def test_twin_a_zero_in_place_of_a_gap_is_noticed(monkeypatch):
    monkeypatch.setattr(curves, "number", lambda value: 0.0 if value is None else float(value))
    with pytest.raises(AssertionError):
        test_what_is_not_finite_is_a_gap_and_never_a_number()


def test_thinning_keeps_extremes_and_gaps_in_order():
    points = [(step, 1.0) for step in range(20_000)]
    points[777], points[15_001], points[9_999] = (777, 50.0), (15_001, -50.0), (9_999, None)
    kept = thin(points, 2000)
    assert len(kept) <= 2000
    assert {points[777], points[15_001], points[9_999]} <= set(kept)
    assert list(kept) == sorted(kept, key=lambda point: point[0])


def test_twin_taking_every_nth_point_loses_them(monkeypatch):
    monkeypatch.setattr(curves, "_extremes", lambda stretch: [stretch[0]])
    with pytest.raises(AssertionError):
        test_thinning_keeps_extremes_and_gaps_in_order()


def test_a_short_line_is_left_as_it_is():
    assert thin([(1, 1.0), (2, None)], 2000) == ((1, 1.0), (2, None))


def test_a_log_of_gaps_only_stays_within_the_limit():
    rows = [train_row(step, 9000, None) for step in range(1, 9001)]
    charts = thinned(charts_of(rows))
    assert max(len(line.points) for chart in charts for line in chart.lines) <= curves.MOST_POINTS
    assert gives(described(charts_of(rows)[0]), 9000)


def test_the_page_gets_plain_json():
    text = json.dumps(to_json(charts_of(log_rows(30, bad=(3,)))), allow_nan=False)
    assert json.loads(text)[0]["lines"][0]["y"][2] is None


def test_an_evaluation_of_rewards_is_no_point_on_the_curve_of_the_loss():
    counted = {"response_tokens": 8}
    rows = [{"current_steps": step, "loss": 0.1, **counted} for step in (1, 2, 3)]
    rows.append({"current_steps": 3, "eval_loss": -0.9, "eval_reward": 0.9, "eval_response_tokens": 8})
    assert evaluates_rewards(rows)
    reward, loss = charts_of(rows)[:2]  # what the run is about leads
    assert (reward.key, loss.key) == ("eval_reward", "loss")
    assert "points" not in {line.style for line in loss.lines}
    assert without_still([reward, loss])[0] == [reward]
    twin = [{name: value for name, value in row.items() if "response" not in name} for row in rows]
    assert "points" in {line.style for line in charts_of(twin)[0].lines}


def test_charts_that_never_change_are_named():
    rows = [{**row, "groups_redrawn": 0.0, "clip_high": 0.0} for row in log_rows(9)]
    rows[7]["clip_high"] = 0.25
    charts, still = without_still(charts_of(rows))
    keys = [chart.key for chart in charts]
    assert "groups_redrawn" not in keys
    assert {"loss", "clip_high"} <= {*keys}
    assert any(one.startswith("Groups redrawn 0") for one in still)
    assert len(charts) + len(still) == len(charts_of(rows))


def test_twin_too_few_points_or_a_gap_are_charts():
    for rows in (
        [{**row, "groups_redrawn": 0.0} for row in log_rows(2)],
        [{**row, "groups_redrawn": None if place == 3 else 0.0} for place, row in enumerate(log_rows(9))],
    ):
        assert "groups_redrawn" in [chart.key for chart in without_still(charts_of(rows))[0]]
