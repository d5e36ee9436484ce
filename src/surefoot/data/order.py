"""Which examples a step sees: a pure function of seed and step, so there is no position to save or to lose.

Each source is walked through an endless row of permutations of itself, so none of its examples comes again before all
of it were seen; an epoch takes the next so many of each source, and a permutation of the epoch decides when it is whose
turn. With one source and whole epochs that is one permutation per epoch.

Permutations are drawn from Philox's raw words. numpy promises those bit for bit on every platform and in every release,
which it does not for `Generator.permutation`. A resumed run asks for step n and gets it.
"""

from __future__ import annotations

import functools

import numpy as np

from surefoot.data.mixture import Mixture

# First words of a stream: each use of the seed draws from its own.
EPOCHS, HELD_OUT, SOURCES, TURNS, MINIBATCHES, ANSWERS, TEXTS, SHARES = range(8)


@functools.lru_cache(maxsize=4)  # the epoch at hand and the next, at its border
def epoch_order(seed: int, epoch: int, mixture: Mixture) -> np.ndarray:
    """The examples of one epoch, read-only: [mixture.epoch_size] int64, places in the sources laid one after the other.
    epoch counts from 0."""
    places = np.empty(mixture.epoch_size, dtype=np.int64)
    turns = np.repeat(np.arange(len(mixture.quotas)), mixture.quotas)
    if len(mixture.quotas) > 1:
        turns = turns[permutation(seed, (TURNS, epoch), mixture.epoch_size)]
    first = 0
    for source, (count, quota) in enumerate(zip(mixture.counts, mixture.quotas, strict=True)):
        places[turns == source] = first + _walk(seed, source, count, epoch * quota, quota)
        first += count
    places.flags.writeable = False
    return places


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Optimizer steps in one pass over `count` examples; a last short batch is a step."""
    return -(-count // batch_size)


def step_examples(seed: int, step: int, mixture: Mixture, batch_size: int) -> tuple[int, np.ndarray]:
    """The epoch of a step and the places of its examples. step counts from 0 over all epochs."""
    epoch, place = divmod(step, steps_per_epoch(mixture.epoch_size, batch_size))
    return epoch, epoch_order(seed, epoch, mixture)[place * batch_size : (place + 1) * batch_size]


def permutation(seed: int, stream: tuple[int, ...], count: int) -> np.ndarray:
    """range(count) in an order that depends on seed and stream alone: [count] int64."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    return np.argsort(words, kind="stable")


def _walk(seed: int, source: int, count: int, start: int, length: int) -> np.ndarray:
    """`length` examples of a source's endless row of permutations, from place `start` on."""
    passes = range(start // count, -(-(start + length) // count))
    row = np.concatenate([permutation(seed, _stream(source, number), count) for number in passes])
    return row[start - passes.start * count :][:length]


def _stream(source: int, number: int) -> tuple[int, ...]:
    """The first source's passes are the epochs of a run with one source, whose order must never change."""
    return (EPOCHS, number) if source == 0 else (SOURCES, source, number)
