"""Which gradient norms are outliers, on curves that are known."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from surefoot.training import spikes
from surefoot.training.spikes import FEWEST, LEAST, WIDTH, WINDOW, after, ceiling

RECALL = 0.95  # at least, of planted spikes
STEPS = 1500
EVERY = 73  # steps from one planted spike to the next


def clean(draws, scatter, follow, drift, heavy):
    """Norms whose logarithms scatter as said, each following the one before by the share `follow`."""
    noise = draws.standard_t(5, STEPS) / math.sqrt(5 / 3) if heavy else draws.standard_normal(STEPS)
    found, value = np.empty(STEPS), 0.0
    for step, one in enumerate(noise):
        value = follow * value + math.sqrt(1 - follow**2) * one
        found[step] = value
    share = np.arange(STEPS) / STEPS
    trend = {"flat": 0 * share, "falls": -1.5 * share, "warms up": np.minimum(0, np.log(share * STEPS / 200 + 1e-2))}
    return np.exp(scatter * found + trend[drift])


def spiked(curve):
    """By step, whether its norm was above the ceiling."""
    found, kept = [], ()
    for norm in curve.tolist():
        highest = ceiling(kept)
        found.append(highest is not None and norm > highest)
        kept = after(kept, norm)
    return np.array(found)


CURVES = [
    (scatter, follow, drift, heavy)
    for scatter, follow, drift, heavy in (
        (0.05, 0.0, "flat", False),
        (0.15, 0.5, "falls", True),
        (0.3, 0.9, "warms up", False),
        (0.3, 0.0, "falls", True),
        (0.45, 0.5, "flat", False),
    )
]


def judged(detect, factor=(10, 100)):
    """Share of the planted spikes that are found, and of clean steps that are taken for one."""
    hits, alarms = [], []
    for number, curve in enumerate(CURVES):
        draws = np.random.default_rng(number)
        norms = clean(draws, *curve)
        alarms.append(detect(norms).mean())
        places = np.arange(2 * FEWEST, STEPS, EVERY)
        norms[places] *= draws.uniform(*factor, len(places))
        hits.append(detect(norms)[places].mean())
    return statistics.mean(hits), statistics.mean(alarms)


def test_planted_spikes_are_found_and_clean_steps_are_not():
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
    assert ceiling(calm) == pytest.approx(2.0 * 2.0 ** (WIDTH * 1.4826))
    assert ceiling((2.0,) * FEWEST) == pytest.approx(2.0 * LEAST)
    assert ceiling((2.0,) * (FEWEST - 1)) is None


def test_a_spike_enters_as_what_it_was_cut_to_and_a_zero_not_at_all():
    calm = (2.0,) * FEWEST
    assert after(calm, 1000.0) == (*calm, pytest.approx(2.0 * LEAST))
    assert after(calm, 0.0) == calm
    assert len(after((1.0,) * WINDOW, 1.0)) == WINDOW


def test_norms_that_stay_high_are_followed():
    kept = (1.0,) * WINDOW
    for _ in range(3 * WINDOW):
        kept = after(kept, 50.0)
    highest = ceiling(kept)
    assert highest is not None
    assert highest > 50.0


def test_the_width_is_the_one_that_was_judged():
    assert (spikes.WIDTH, spikes.LEAST, spikes.WINDOW, spikes.FEWEST) == (6.0, 3.0, 128, 32)
