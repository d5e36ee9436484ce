import math

import pytest

from surefoot.training.guard import GuardCounts, Verdict, judge


@pytest.mark.parametrize(
    ("loss", "norm", "can_fall", "verdict"),
    [
        (1.0, 2.0, False, Verdict("stepped", None)),
        (0.0, 0.0, True, Verdict("stepped", None)),
        (math.nan, 2.0, False, Verdict("non_finite", "loss")),
        (math.inf, math.nan, True, Verdict("non_finite", "loss")),
        (1.0, math.nan, False, Verdict("non_finite", "grad_norm")),
        (1.0, math.inf, True, Verdict("scaler", "grad_norm")),
    ],
)
def test_verdicts(loss, norm, can_fall, verdict):
    assert judge(loss, norm, can_fall) == verdict


def test_counts():
    counts = GuardCounts()
    for decision in ("non_finite", "scaler", "non_finite"):
        counts = counts.after(decision)
    assert counts == GuardCounts(consecutive=2, skipped=2, scaler=1)
    assert counts.after("stepped") == GuardCounts(consecutive=0, skipped=2, scaler=1)


def test_a_step_that_was_held_back_counts_nothing():
    assert GuardCounts(2, 3, 4).after("held") == GuardCounts(2, 3, 4)
