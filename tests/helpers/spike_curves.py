"""Synthetic curves of gradient norms, and the steps that are detected as spikes."""

import math

import numpy as np

from surefoot.training.guard import FEWEST, norms_after, spike_ceiling

STEPS = 1500
EVERY = 73  # steps from one planted spike to the next
PLACES = np.arange(2 * FEWEST, STEPS, EVERY)  # of planted spikes
DRIFTS = ("flat", "falls", "warms up")


def clean(draws: np.random.Generator, scatter: float, follow: float, drift: str, heavy: bool) -> np.ndarray:
    """Return norms whose logarithms scatter as given, each correlated with the previous one by `follow`."""
    noise = draws.standard_t(5, STEPS) / math.sqrt(5 / 3) if heavy else draws.standard_normal(STEPS)
    found, value = np.empty(STEPS), 0.0
    for step, one in enumerate(noise):
        value = follow * value + math.sqrt(1 - follow**2) * one
        found[step] = value
    share = np.arange(STEPS) / STEPS
    trend = {"flat": 0 * share, "falls": -1.5 * share, "warms up": np.minimum(0, np.log(share * STEPS / 200 + 1e-2))}
    return np.exp(scatter * found + trend[drift])


def drawn(draws: np.random.Generator) -> np.ndarray:
    """Return a clean curve of any of these kinds."""
    return clean(
        draws, draws.uniform(0.05, 0.45), draws.uniform(0, 0.9), str(draws.choice(DRIFTS)), bool(draws.random() < 0.5)
    )


def spiked(curve: np.ndarray) -> np.ndarray:
    """Return for each step whether its norm was above the ceiling."""
    found, kept = [], ()
    for norm in curve.tolist():
        highest = spike_ceiling(kept)
        found.append(highest is not None and norm > highest)
        kept = norms_after(kept, norm)
    return np.array(found)
