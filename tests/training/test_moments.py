"""Moments that are not finite: found before the weights move, named, and no false alarm; how often one looks."""

import math

import pytest
import torch

from helpers.toy_model import bits, same_bits, settings, toy_batches, toy_engine, toy_examples, toy_loss
from surefoot.system.errors import Diverged
from surefoot.training import optimizer_state
from surefoot.training.optimizer_state import SMALL, first_bad_moment, look_at_moments, look_is_due, tokens_per_look
from surefoot.training.step import train_step

CPU = torch.device("cpu")


def take(engine, step, **named):
    batches = toy_batches(toy_examples(6), 2)
    return train_step(engine, toy_loss, batches, step=step, lr=0.05, scale=None, settings=settings(), **named)


def spoiled(value=math.nan):
    engine = toy_engine()
    take(engine, 1)
    engine.optimizer.state[engine.parameters["head.weight"]]["exp_avg_sq"][3, 2] = value
    return engine


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_moment_holds_the_step_back_and_is_named(value):
    engine = spoiled(value)
    before = {name: one for name, one in bits(engine).items() if "/" not in name}
    report = take(engine, 2)
    assert (report.decision, report.non_finite, report.moment) == ("non_finite", "moment", "head.weight/exp_avg_sq")
    assert report.loss is not None
    assert same_bits({name: bits(engine)[name] for name in before}, before)


def test_twin_without_the_look_the_weights_are_lost(monkeypatch):
    engine = spoiled()
    monkeypatch.setattr(optimizer_state, "look_at_moments", lambda found, device: torch.zeros(()))
    assert take(engine, 2).decision == "stepped"
    assert not torch.isfinite(engine.parameters["head.weight"]).all()


def test_finite_moments_whose_sum_overflows_are_no_alarm():
    engine = spoiled(3e38)
    assert not torch.isfinite(look_at_moments(engine.moments().values(), CPU))
    report = take(engine, 2)
    assert (report.decision, report.moment) == ("stepped", "")


def test_a_look_takes_every_number_of_every_type():
    there = {"a": torch.ones(3), "b": torch.ones(4, dtype=torch.bfloat16), "c": torch.zeros(2, dtype=torch.uint8)}
    assert look_at_moments(there.values(), CPU).item() == pytest.approx(math.sqrt(3) + 2)
    there["b"][2] = math.nan
    assert look_at_moments(there.values(), CPU).isnan()
    assert first_bad_moment(there) == "b"
    assert look_at_moments([], CPU).item() == 0


@pytest.mark.parametrize(("device", "enough"), [("cpu", 3_000), ("cuda", 15_000)])
def test_adapters_look_in_every_step_and_full_training_where_it_costs_little(device, enough):
    assert tokens_per_look(SMALL, SMALL, device) == 0
    assert [look_is_due(step, 10, 0.0) for step in (1, 2, 3)] == [True] * 3
    adapter, whole = (tokens_per_look(trained * SMALL, 200 * SMALL, device) for trained in (2, 200))
    assert look_is_due(1, enough // 100, adapter)
    assert look_is_due(1, enough, whole)
    assert [look_is_due(step, enough // 3, whole) for step in (1, 2, 3, 4, 5, 6)] == [False, False, True] * 2
    assert not look_is_due(1, 0, whole)


def test_a_step_that_is_not_due_does_not_look(monkeypatch):
    monkeypatch.setattr(optimizer_state, "look_is_due", lambda step, tokens, per_look: False)
    assert take(spoiled(), 2).decision == "stepped"


def test_the_run_ends_at_once_with_one_line():
    from surefoot.training.loop import _diverged, _is_lost
    from surefoot.training.state import RunState

    report = take(spoiled(), 2)
    state = RunState(step=1).after_step(report)

    class Patient:
        max_consecutive, max_recent = 99, 99

    assert _is_lost(Patient, state, report)
    error = _diverged(report, state, "a replay of the step was finite", 99)
    assert isinstance(error, Diverged)
    assert "a moment of the optimizer is not finite (head.weight/exp_avg_sq)" in str(error)
    assert len(error.faults) == 1
