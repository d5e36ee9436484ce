"""What changes in a run: the mean loss, the best evaluation, the fp16 loss scale."""

import math

import pytest
import torch

from surefoot.training import state as scaling
from surefoot.training.report import EvalReport, StepReport
from surefoot.training.state import Best, Goal, LossScale, RunState


def after(*steps):
    state = RunState()
    for number, (loss, weight, decision) in enumerate(steps, 1):
        report = StepReport(number, loss, 1.0, 0.1, weight, weight, (), decision, None, 0.0)
        state = state.after_step(report)
    return state


def test_the_mean_loss_weighs_tokens_and_leaves_out_steps_that_moved_nothing():
    steps = [(4.0, 10, "stepped"), (None, 10, "non_finite"), (9.0, 10, "scaler"), (1.0, 30, "stepped")]
    assert after(*steps).mean_loss == (4.0 * 10 + 1.0 * 30) / 40
    assert after(*steps).mean_loss != (4.0 + 1.0) / 2  # twin: a mean over steps
    assert RunState().mean_loss is None


def test_the_state_survives_json():
    state = after((0.1 + 0.2, 7, "stepped"))
    assert RunState.from_json(state.to_json()) == state


def report(step, loss=1.0, **metrics):
    return EvalReport(step, loss, math.exp(loss), 0.5, 10, 1.0, metrics)


def walk(goal, reports, min_delta=0.0):
    state = RunState()
    for one in reports:
        state = state.after_evaluation(one, goal, min_delta)
    return state


def test_the_lowest_loss_or_the_highest_metric_is_the_best(monkeypatch):
    assert walk(Goal(), [report(1, 2.0), report(2, 1.0), report(3, 1.5)]).best == Best(2, 1.0)
    goal = Goal("exact_match")
    reports = [report(1, 2.0, exact_match=0.1), report(2, 3.0, exact_match=0.4), report(3, 1.0, exact_match=0.4)]
    state = walk(goal, reports)
    assert state.best == Best(3, 0.4, loss=1.0), "as good, with the lower loss"
    assert (state.stale, state.evaluated) == (1, 3)
    monkeypatch.setattr(Goal, "gain", lambda self, value, best: math.inf if best is None else best - value)
    assert walk(goal, reports).best == Best(1, 0.1, 2.0)  # twin: a metric taken for a loss keeps the worst


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(value):
    assert walk(Goal(), [report(1, 2.0), report(2, value) if value != math.inf else report(2, 700.0)]).best.step == 1
    assert walk(Goal("m"), [report(1, m=0.5), report(2, m=value)]).best == Best(1, 0.5, 1.0)
    assert walk(Goal("m"), [report(1, m=value)]).best is None


def test_a_gain_below_min_delta_is_the_best_and_still_stale():
    state = walk(Goal("m"), [report(1, m=0.50), report(2, m=0.51)], min_delta=0.1)
    assert state.best == Best(2, 0.51, 1.0)
    assert state.stale == 1


def test_ties_of_a_metric_go_to_the_lower_loss(monkeypatch):
    """Nothing is right at any step, as in many a first run: the untrained model must not win by coming first."""
    reports = [report(0, 5.0, m=0.0), report(2, 3.0, m=0.0), report(4, 4.0, m=0.0), report(6, 3.0, m=0.0)]
    state = walk(Goal("m"), reports)
    assert state.best == Best(2, 0.0, loss=3.0), "of equal losses the earlier step"
    assert state.stale == 3, "a tie is no progress for early stopping"
    monkeypatch.setattr(Best, "loses_tie", lambda self, value, loss: False)
    assert walk(Goal("m"), reports).best == Best(0, 0.0, 5.0)  # twin: the untrained model wins


@pytest.mark.parametrize("goal", ["reward", "loss"])
@pytest.mark.parametrize(("first", "best"), [(0, 2), (1, 1)])
def test_weights_as_good_as_the_untrained_are_published_after_training(goal, first, best):
    """Where answers are drawn the loss is minus the reward, so both tie. Between trained weights, the twin, the first
    stays."""
    reports = [report(step, -0.5, reward=0.5) for step in (first, 2, 4)]
    state = walk(Goal(goal), reports)
    assert state.best is not None
    assert state.best.step == best
    assert state.stale == 2
    better = walk(Goal(goal), [report(0, -0.5, reward=0.5), report(2, -0.25, reward=0.25)])
    assert better.best is not None
    assert better.best.step == 0  # worse than untrained: that is told


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


def torch_trajectory(overflows: list[bool], interval: int) -> list[float]:
    """The scale that torch.amp.GradScaler uses at each step, driven with gradients that overflow where told."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=interval)
    scales = []
    for overflow in overflows:
        scales.append(scaler.get_scale())
        scaler.scale(parameter.sum()).backward()
        if overflow:
            parameter.grad.fill_(float("inf"))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scales


def our_trajectory(overflows: list[bool]) -> list[float]:
    scale, scales = LossScale(), []
    for overflow in overflows:
        scales.append(scale.scale)
        scale = scale.after_overflow() if overflow else scale.after_step()
    return scales


PATTERN = [False] * 9 + [True] * 3 + [False] * 4 + [True] + [False] * 12


@pytest.mark.parametrize("interval", [4, 5])
def test_same_scale_as_torch(monkeypatch, interval):
    monkeypatch.setattr(scaling, "GROWTH_INTERVAL", interval)
    same = our_trajectory(PATTERN) == torch_trajectory(PATTERN, interval=4)
    assert same == (interval == 4)  # twin: another interval


def test_the_scale_stops_at_its_floor():
    scale = LossScale(2.0)
    assert scale.can_fall
    scale = scale.after_overflow()
    assert scale == LossScale(1.0)
    assert not scale.can_fall
    assert scale.after_overflow() == LossScale(1.0)
