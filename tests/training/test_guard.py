import math

import pytest

from surefoot.training.guard import RECENT, GuardCounts, judge


@pytest.mark.parametrize(
    ("loss", "norm", "can_fall", "verdict"),
    [
        (1.0, 2.0, False, ("stepped", None)),
        (0.0, 0.0, True, ("stepped", None)),
        (math.nan, 2.0, False, ("non_finite", "loss")),
        (math.inf, math.nan, True, ("non_finite", "loss")),
        (1.0, math.nan, False, ("non_finite", "grad_norm")),
        (1.0, math.inf, True, ("scaler", "grad_norm")),
    ],
)
def test_verdicts(loss, norm, can_fall, verdict):
    assert judge(loss, norm, can_fall) == verdict


def test_counts():
    counts = GuardCounts()
    for step, decision in enumerate(("non_finite", "scaler", "non_finite"), 1):
        counts = counts.after(step, decision)
    assert counts == GuardCounts(consecutive=2, skipped=2, scaler=1, recent=(1, 3))
    assert counts.after(4, "stepped") == GuardCounts(consecutive=0, skipped=2, scaler=1, recent=(1, 3))
    assert counts.after(4, "stepped", spiked=True).spikes == 1


def test_recent_steps_are_forgotten_in_time():
    counts = GuardCounts(recent=(1, 3))
    assert counts.after(RECENT, "stepped").recent == (1, 3)
    assert counts.after(RECENT + 1, "stepped").recent == (3,)
    assert counts.after(RECENT + 2, "non_finite").recent == (3, RECENT + 2)


def test_a_step_that_was_held_back_counts_nothing():
    assert GuardCounts(2, 3, 4).after(9, "held") == GuardCounts(2, 3, 4)
