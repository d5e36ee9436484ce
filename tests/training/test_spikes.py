"""Which gradient norms are outliers, on curves that are known."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from helpers.spike_curves import PLACES, STEPS, clean, spiked
from surefoot.training import guard as spikes
from surefoot.training.guard import FEWEST, LEAST, WIDTH, WINDOW, norms_after, spike_ceiling

RECALL = 0.95  # at least, of planted spikes


CURVES = [
    (scatter, follow, drift, heavy)
    for scatter, follow, drift, heavy in (
        (0.05, 0.0, "flat", False),
        (0.15, 0.5, "falls", True),
        (0.3, 0.9, "warms up", False),
        (0.3, 0.0, "falls", True),
        (0.45, 0.5, "flat", False),
        (0.05, 0.9, "warms up", True),
        (0.15, 0.0, "flat", True),
    )
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


def test_twin_a_mean_and_a_standard_deviation_miss_spikes():
    def by_deviation(curve):
        found = []
        for step, norm in enumerate(curve):
            window = curve[max(0, step - WINDOW) : step]
            found.append(step >= FEWEST and norm > window.mean() + WIDTH * window.std())
        return np.array(found)

    assert judged(by_deviation)[0] < RECALL


def test_by_hand():
    calm = (1.0, 2.0, 4.0) * FEWEST  # the median is 2, and most lie a factor of 2 from it
    assert spike_ceiling(calm) == pytest.approx(2.0 * 2.0 ** (WIDTH * 1.4826))
    assert spike_ceiling((2.0,) * FEWEST) == pytest.approx(2.0 * LEAST)
    assert spike_ceiling((2.0,) * (FEWEST - 1)) is None


def test_a_spike_enters_as_what_it_was_cut_to_and_a_zero_not_at_all():
    calm = (2.0,) * FEWEST
    assert norms_after(calm, 1000.0) == (*calm, pytest.approx(2.0 * LEAST))
    assert norms_after(calm, 0.0) == calm
    assert len(norms_after((1.0,) * WINDOW, 1.0)) == WINDOW


def test_norms_that_stay_high_are_followed():
    kept = (1.0,) * WINDOW
    for _ in range(3 * WINDOW):
        kept = norms_after(kept, 50.0)
    highest = spike_ceiling(kept)
    assert highest is not None
    assert highest > 50.0


def test_the_width_is_the_one_that_was_judged():
    assert (spikes.WIDTH, spikes.LEAST, spikes.WINDOW, spikes.FEWEST) == (6.0, 3.0, 128, 32)
