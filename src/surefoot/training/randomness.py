"""Every random draw is a function of (seed, step, micro-batch, rank).

Reseeding before each micro-batch costs microseconds and removes the saved generator states, and with them the whole
family of "resumed, but with other dropout masks" faults.
"""

from __future__ import annotations

import numpy as np
import torch


def draw_seed(seed: int, step: int, micro_batch: int, rank: int = 0) -> int:
    """A well-mixed 63-bit seed; neighbouring steps and micro-batches share nothing."""
    words = np.random.SeedSequence((seed, step, micro_batch, rank)).generate_state(2, np.uint32)
    return (int(words[0]) << 31) ^ int(words[1])


def seed_micro_batch(seed: int, step: int, micro_batch: int, rank: int = 0) -> None:
    """Set torch's generators on all devices."""
    torch.manual_seed(draw_seed(seed, step, micro_batch, rank))
