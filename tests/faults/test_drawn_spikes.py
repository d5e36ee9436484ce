"""How many planted spikes of the gradient norm are found on curves drawn at random, and how many clean steps are taken
for one. `make soak SOAK="-k drawn_curves --trials 'gradient spikes=1000'"` for more."""

import secrets

import numpy as np
import pytest

from helpers.spike_curves import PLACES, STEPS, drawn, spiked

LARGE = 10.0  # times the clean norm: what has to be found
RECALL = 0.9  # at least, of large ones: curves that scatter by half of themselves hide some
ALARMS = 5e-4  # at most, of clean steps: what `training/spikes.py` was chosen by had 2e-5


@pytest.mark.soak("gradient spikes")
def test_spikes_of_drawn_curves(trials: int) -> None:
    """Each curve once as it is and once with spikes of 3 to 100 times, drawn evenly in their logarithm."""
    first = secrets.randbelow(10**9)
    alarms, sizes, hits = 0, [], []
    for seed in range(first, first + trials):
        draws = np.random.default_rng(seed)
        norms = drawn(draws)
        alarms += int(spiked(norms).sum())
        factors = np.exp(draws.uniform(np.log(3), np.log(100), len(PLACES)))
        norms[PLACES] *= factors
        sizes += factors.tolist()
        hits += spiked(norms)[PLACES].tolist()
    large = np.array(sizes) >= LARGE
    found = np.array(hits)
    recall, small, false = found[large].mean(), found[~large].mean(), alarms / (trials * STEPS)
    print(
        f"spikes: {trials} curves, seeds from {first}: {found[large].sum()} of {large.sum()} of 10 to 100 times found "
        f"({recall:.1%}), {found[~large].sum()} of {(~large).sum()} of 3 to 10 times ({small:.1%}); "
        f"{alarms} false alarms in {trials * STEPS:,} clean steps"
    )
    assert recall >= RECALL
    assert false <= ALARMS
