"""Which evaluation is the best: a loss falls, a metric rises, NaN is never a gain."""

import math

import pytest

from surefoot.training.goal import Goal
from surefoot.training.report import EvalReport
from surefoot.training.state import Best, RunState


def report(step, loss=1.0, **metrics):
    return EvalReport(step, loss, math.exp(loss), 0.5, 10, 1.0, metrics)


def walk(goal, reports, min_delta=0.0):
    state = RunState()
    for one in reports:
        state = state.after_evaluation(one, goal, min_delta)
    return state


def test_the_lowest_loss():
    assert walk(Goal(), [report(1, 2.0), report(2, 1.0), report(3, 1.5)]).best == Best(2, 1.0)


def test_the_highest_metric():
    goal = Goal("exact_match")
    reports = [report(1, 2.0, exact_match=0.1), report(2, 3.0, exact_match=0.4), report(3, 1.0, exact_match=0.4)]
    state = walk(goal, reports)
    assert state.best == Best(2, 0.4)
    assert (state.stale, state.evaluated) == (1, 3)


def test_twin_a_metric_taken_for_a_loss_keeps_the_worst(monkeypatch):
    monkeypatch.setattr(Goal, "gain", lambda self, value, best: math.inf if best is None else best - value)
    reports = [report(1, exact_match=0.1), report(2, exact_match=0.4)]
    assert walk(Goal("exact_match"), reports).best == Best(1, 0.1)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(value):
    assert walk(Goal(), [report(1, 2.0), report(2, value) if value != math.inf else report(2, 700.0)]).best.step == 1
    assert walk(Goal("m"), [report(1, m=0.5), report(2, m=value)]).best == Best(1, 0.5)
    assert walk(Goal("m"), [report(1, m=value)]).best is None


def test_a_gain_below_min_delta_is_the_best_and_still_stale():
    state = walk(Goal("m"), [report(1, m=0.50), report(2, m=0.51)], min_delta=0.1)
    assert state.best == Best(2, 0.51)
    assert state.stale == 1
