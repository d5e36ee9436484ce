from __future__ import annotations

import pytest

from surefoot.methods.losses.ppo import next_coefficient


def step(now=0.2, kl=6.0, target: float | None = 6.0, answers=256) -> float:
    return next_coefficient(now, kl, target=target, horizon=10_000, answers=answers)


def test_without_a_target_it_stays():
    assert step(kl=1e9, target=None) == 0.2


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (6.0, 1.0),
        (6.6, 1 + 0.1 * 256 / 10_000),
        (60.0, 1 + 0.2 * 256 / 10_000),  # no more than a fifth per horizon
        (0.0, 1 - 0.2 * 256 / 10_000),
        (-3.0, 1 - 0.2 * 256 / 10_000),
    ],
)
def test_it_rises_above_the_target_and_falls_below_it(kl, factor):
    assert step(kl=kl) == pytest.approx(0.2 * factor, rel=1e-12)


def test_it_never_turns_negative():
    assert step(kl=0.0, answers=10**6) == 0.0


def test_a_simulated_policy_settles_at_the_target():
    """A policy whose KL is inversely proportional to the coefficient, as if reward and penalty were in balance."""
    coefficient = 1.0
    for _ in range(2_000):
        coefficient = step(coefficient, kl=0.6 / coefficient)
    assert 0.6 / coefficient == pytest.approx(6.0, rel=0.01)
