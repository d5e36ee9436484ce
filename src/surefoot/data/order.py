"""Which examples a step sees: a pure function of seed and step, so there is no position to save or to lose.

Every epoch has its own permutation, drawn from Philox's raw words. numpy promises those bit for bit on every platform
and in every release, which it does not for `Generator.permutation`. A resumed run asks for step n and gets it.
"""

from __future__ import annotations

import functools

import numpy as np

EPOCHS, HELD_OUT = 0, 1  # first words of a stream: each use of the seed draws from its own


def epoch_order(seed: int, epoch: int, count: int) -> np.ndarray:
    """A permutation of range(count), read-only: [count] int64. epoch counts from 0."""
    return permutation(seed, (EPOCHS, epoch), count)


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Optimizer steps in one pass over `count` examples; a last short batch is a step."""
    return -(-count // batch_size)


def step_examples(seed: int, step: int, count: int, batch_size: int) -> tuple[int, np.ndarray]:
    """The epoch of a step and the indices of its examples. step counts from 0 over all epochs."""
    epoch, place = divmod(step, steps_per_epoch(count, batch_size))
    return epoch, epoch_order(seed, epoch, count)[place * batch_size : (place + 1) * batch_size]


@functools.lru_cache(maxsize=4)  # the epoch at hand and the next, at its border
def permutation(seed: int, stream: tuple[int, ...], count: int) -> np.ndarray:
    """range(count) in an order that depends on seed and stream alone. Read-only."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    order = np.argsort(words, kind="stable")
    order.flags.writeable = False
    return order
