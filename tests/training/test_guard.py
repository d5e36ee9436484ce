"""What becomes of a step by its numbers; spikes; rollbacks: which data a step learns from, and what counts."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest

from helpers.spike_curves import PLACES, STEPS, clean, spiked
from surefoot.training.guard import (
    FEWEST,
    LEAST,
    RECENT,
    WIDTH,
    WINDOW,
    GuardCounts,
    Rollback,
    counted_from,
    data_step,
    is_on_the_way,
    judge,
    norms_after,
    spike_ceiling,
)
from surefoot.training.report import StepReport
from surefoot.training.state import RunState


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
    assert GuardCounts(2, 3, 4).after(9, "held") == GuardCounts(2, 3, 4)


def test_recent_steps_are_forgotten_in_time():
    counts = GuardCounts(recent=(1, 3))
    assert counts.after(RECENT, "stepped").recent == (1, 3)
    assert counts.after(RECENT + 1, "stepped").recent == (3,)
    assert counts.after(RECENT + 2, "non_finite").recent == (3, RECENT + 2)


RECALL = 0.95  # at least, of planted spikes


CURVES = [  # scatter, how far a step follows the one before, drift, heavy tails
    (0.05, 0.0, "flat", False),
    (0.15, 0.5, "falls", True),
    (0.3, 0.9, "warms up", False),
    (0.3, 0.0, "falls", True),
    (0.45, 0.5, "flat", False),
    (0.05, 0.9, "warms up", True),
    (0.15, 0.0, "flat", True),
]


def judged(detect, factor=(10, 100)):
    """Share of the planted spikes that are found, and of clean steps that are taken for one."""
    hits, alarms = [], []
    for number, curve in enumerate(CURVES):
        draws = np.random.default_rng(number)
        norms = clean(draws, *curve)
        alarms.append(detect(norms).mean())
        norms[PLACES] *= draws.uniform(*factor, len(PLACES))
        hits.append(detect(norms)[PLACES].mean())
    return statistics.mean(hits), statistics.mean(alarms)


def test_planted_spikes_are_found_and_clean_steps_are_not():
    assert len(CURVES) * STEPS >= 10_000
    recall, false = judged(spiked)
    assert recall >= RECALL
    assert false == 0

    def by_deviation(curve):  # twin: a mean and a standard deviation miss spikes
        found = []
        for step, norm in enumerate(curve):
            window = curve[max(0, step - WINDOW) : step]
            found.append(step >= FEWEST and norm > window.mean() + WIDTH * window.std())
        return np.array(found)

    assert judged(by_deviation)[0] < RECALL


def test_the_ceiling_by_hand():
    calm = (1.0, 2.0, 4.0) * FEWEST  # the median is 2, and most lie a factor of 2 from it
    assert spike_ceiling(calm) == pytest.approx(2.0 * 2.0 ** (WIDTH * 1.4826))
    assert spike_ceiling((2.0,) * FEWEST) == pytest.approx(2.0 * LEAST)
    assert spike_ceiling((2.0,) * (FEWEST - 1)) is None
    # A spike enters as what it was cut to, and a zero not at all.
    calm = (2.0,) * FEWEST
    assert norms_after(calm, 1000.0) == (*calm, pytest.approx(2.0 * LEAST))
    assert norms_after(calm, 0.0) == calm
    assert len(norms_after((1.0,) * WINDOW, 1.0)) == WINDOW


def test_norms_that_stay_high_are_followed():
    kept = (1.0,) * WINDOW
    for _ in range(3 * WINDOW):
        kept = norms_after(kept, 50.0)
    assert spike_ceiling(kept) > 50.0


def test_the_width_is_the_one_that_was_judged():
    assert (WIDTH, LEAST, WINDOW, FEWEST) == (6.0, 3.0, 128, 32)


FIRST = Rollback(back_to=4, lost=7, ahead=3)
LATER = Rollback(back_to=8, lost=9, ahead=4)
EARLIER = Rollback(back_to=2, lost=6, ahead=7)  # checkpoint-4 was damaged meanwhile


@pytest.mark.parametrize(
    ("rollbacks", "expected"),
    [
        ([], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ([FIRST], [1, 2, 3, 4, 8, 9, 10, 11, 12, 13]),
        ([FIRST, LATER], [1, 2, 3, 4, 8, 9, 10, 11, 13, 14]),
        ([FIRST, EARLIER], [1, 2, 10, 11, 12, 13, 14, 15, 16, 17]),
    ],
)
def test_a_step_learns_from_the_data_that_the_last_rollback_before_it_says(rollbacks, expected):
    assert [data_step(rollbacks, step) for step in range(1, 11)] == expected


@pytest.mark.parametrize(
    ("step", "known", "expected"),
    [
        (4, [], True),  # what it goes back to
        (3, [], True),
        (5, [], False),  # written between the checkpoint and the bad step
        (5, [FIRST], True),
        (8, [FIRST], True),
        (9, [FIRST], False),
        (9, [FIRST, LATER], True),
        (5, [EARLIER], False),  # of another run
    ],
)
def test_a_run_comes_by_what_was_saved_before_or_after_its_rollbacks(step, known, expected):
    assert is_on_the_way(step, known, [FIRST, LATER]) == expected


def test_the_state_carries_rollbacks_through_json_and_reads_states_without():
    state = RunState(step=9, rollbacks=(FIRST, LATER))
    told = json.loads(json.dumps(state.to_json()))
    assert RunState.from_json(told) == state
    del told["rollbacks"]
    assert RunState.from_json(told) == RunState(step=9)


def state_after(state, step, decision):
    return state.after_step(
        StepReport(step=step, loss=None, grad_norm=None, lr=0.1, weight=1, tokens=1, examples=(), decision=decision,
                   non_finite="loss" if decision == "non_finite" else None, seconds=0.0)
    )  # fmt: skip


def test_steps_before_the_checkpoint_count_against_the_run_no_longer():
    """Lost at step 9 with those of 1, 3 and 4 among the last ones; the next bad step is the first one again."""
    back = Rollback(back_to=4, lost=9, ahead=5)
    at_checkpoint = RunState(step=4, guard=GuardCounts(skipped=3, recent=(1, 3, 4)))
    on = state_after(RunState(step=4, guard=at_checkpoint.guard, rollbacks=(back,)), 5, "non_finite")
    assert on.guard == GuardCounts(consecutive=1, skipped=4, recent=(5,))
    assert state_after(on, 6, "stepped").guard.recent == (5,)
    twin = state_after(at_checkpoint, 5, "non_finite")  # went back nowhere
    assert twin.guard.recent == (1, 3, 4, 5)


def test_which_count_is_told_by_step_and_rollbacks_alone():
    """So a run that goes on from an older checkpoint than the one it went back to counts as the one it was."""
    assert [counted_from([], step) for step in (1, 9)] == [0, 0]
    assert [counted_from([FIRST, LATER], step) for step in (4, 5, 8, 9, 20)] == [0, 4, 4, 8, 8]
    assert [counted_from([FIRST, EARLIER], step) for step in (2, 3, 4, 5)] == [0, 2, 2, 2]
    older = RunState(step=2, guard=GuardCounts(recent=(1,)), rollbacks=(FIRST,))
    for step in (3, 4):
        older = state_after(older, step, "stepped")
    assert older.guard.recent == (1,)
    assert state_after(older, 5, "stepped").guard.recent == ()


def test_a_state_between_two_bad_steps_is_not_healthy():
    assert RunState().is_healthy
    assert not RunState(guard=GuardCounts(consecutive=1)).is_healthy
    assert RunState(guard=GuardCounts(skipped=2, recent=(1, 2))).is_healthy
