"""Which evaluation is the best: a loss falls, a metric rises, NaN is never a gain."""

import math

import pytest

from surefoot.training.report import EvalReport
from surefoot.training.state import Best, Goal, RunState


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
    assert state.best == Best(3, 0.4, loss=1.0), "as good, with the lower loss"
    assert (state.stale, state.evaluated) == (1, 3)


def test_twin_a_metric_taken_for_a_loss_keeps_the_worst(monkeypatch):
    monkeypatch.setattr(Goal, "gain", lambda self, value, best: math.inf if best is None else best - value)
    reports = [report(1, exact_match=0.1), report(2, exact_match=0.4)]
    assert walk(Goal("exact_match"), reports).best == Best(1, 0.1, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(value):
    assert walk(Goal(), [report(1, 2.0), report(2, value) if value != math.inf else report(2, 700.0)]).best.step == 1
    assert walk(Goal("m"), [report(1, m=0.5), report(2, m=value)]).best == Best(1, 0.5, 1.0)
    assert walk(Goal("m"), [report(1, m=value)]).best is None


def test_a_gain_below_min_delta_is_the_best_and_still_stale():
    state = walk(Goal("m"), [report(1, m=0.50), report(2, m=0.51)], min_delta=0.1)
    assert state.best == Best(2, 0.51, 1.0)
    assert state.stale == 1


def check_that_ties_go_to_the_lower_loss():
    """Nothing is right at any step, as in many a first run: the untrained model must not win by coming first."""
    reports = [report(0, 5.0, m=0.0), report(2, 3.0, m=0.0), report(4, 4.0, m=0.0), report(6, 3.0, m=0.0)]
    state = walk(Goal("m"), reports)
    assert state.best == Best(2, 0.0, loss=3.0), "of equal losses the earlier step"
    assert state.stale == 3, "a tie is no progress for early stopping"


def test_ties_of_a_metric_go_to_the_lower_loss():
    check_that_ties_go_to_the_lower_loss()


def test_twin_without_the_loss_the_untrained_model_wins(monkeypatch):
    monkeypatch.setattr(Best, "loses_tie", lambda self, value, loss: False)
    with pytest.raises(AssertionError):
        check_that_ties_go_to_the_lower_loss()


def test_a_better_metric_needs_no_lower_loss():
    assert walk(Goal("m"), [report(1, 1.0, m=0.1), report(2, 9.0, m=0.2)]).best == Best(2, 0.2, 9.0)


def test_a_loss_that_is_not_finite_wins_no_tie_and_loses_any():
    assert walk(Goal("m"), [report(1, 1.0, m=0.0), report(2, math.nan, m=0.0)]).best == Best(1, 0.0, 1.0)
    assert walk(Goal("m"), [report(1, math.nan, m=0.0), report(2, 9.0, m=0.0)]).best == Best(2, 0.0, 9.0)


def test_a_state_written_before_losses_were_kept_can_be_gone_on_from():
    old = RunState(step=4, best=Best(2, 0.5), evaluated=2).to_json()
    del old["best"]["loss"]
    state = RunState.from_json(old)
    assert state.best == Best(2, 0.5, loss=None)
    assert state.after_evaluation(report(6, 2.0, m=0.5), Goal("m"), 0.0).best == Best(6, 0.5, 2.0)
    assert state.after_evaluation(report(6, 0.5), Goal(), 0.0).best == Best(2, 0.5), "a loss has nothing beside it"
