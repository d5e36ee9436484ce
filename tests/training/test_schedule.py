import math

import pytest

from surefoot.training.optimizer import Schedule

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


@pytest.mark.parametrize(("kind", "make"), [("linear", "linear"), ("cosine", "cosine"), ("constant", "constant")])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_from_zero_it_is_the_curve_of_transformers(kind, make, warmup):
    """The twin is the usual curve, which differs wherever there is a warm-up."""
    import torch
    from transformers import get_scheduler

    name = "constant_with_warmup" if make == "constant" else make
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=3e-4)
    theirs = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=20)
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    ours = Schedule(kind, peak=3e-4, total=20, warmup=warmup, from_zero=True)
    usual = Schedule(kind, peak=3e-4, total=20, warmup=warmup)
    assert [ours.rate(step) for step in range(20)] == pytest.approx(rates, abs=EXACT)
    assert ([usual.rate(step) for step in range(20)] == pytest.approx(rates, abs=EXACT)) == (warmup == 0)
