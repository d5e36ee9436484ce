import math

import pytest

from surefoot.training.schedule import Schedule

EXACT = 1e-15  # float64 arithmetic of a handful of operations


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1]),
        ("linear", [1 / 3, 2 / 3, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", [1 / 3, 2 / 3] + [0.5 * (1 + math.cos(math.pi * k / 6)) for k in range(6)]),
        ("wsd", [1 / 3, 2 / 3, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]),
    ],
)
def test_hand_computed_table(kind, expected):
    schedule = Schedule(kind, peak=1.0, total=8, warmup=2, decay=3)
    assert [schedule.rate(step) for step in range(8)] == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_first_step_moves_and_peak_is_reached_but_never_passed(kind, warmup):
    schedule = Schedule(kind, peak=3e-4, total=20, warmup=warmup, decay=4)
    rates = [schedule.rate(step) for step in range(20)]
    assert rates[0] > 0
    assert rates[warmup] == 3e-4 == max(rates)
    assert min(rates) > 0


def test_a_run_of_one_step_trains_at_the_peak():
    assert Schedule("cosine", 1.0, total=1, warmup=0).rate(0) == 1.0
