"""Which examples a step sees: a pure function of seed and step, so there is no position to save or to lose.

A mixture says how many examples of each source an epoch holds. Without weights a source gives `epochs` passes of
itself, one if it says nothing. With weights an epoch is as long as all sources together and is shared out by weight.
Numbers are whole and equal in every epoch, so steps per epoch are known before the first.

Each source is an endless sequence of permutations of itself, so none of its examples repeats before all of it were
seen; an epoch takes the next so many of each source, and a permutation of the epoch interleaves the sources. With one
source and whole epochs that is one permutation per epoch. Held-out records and shares of the data are drawn the same
way, only when asked for.

Permutations are drawn from Philox's raw words. numpy promises those bit for bit on every platform and in every release,
which it does not for `Generator.permutation`. A resumed run asks for step n and gets it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Part:
    """One source.

    name: for messages.
    count: its examples.
    weight, epochs: as asked for; None: not asked.
    """

    name: str
    count: int
    weight: float | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class Mixture:
    """How many examples of each source an epoch holds.

    counts: examples of each source, which lie one after the other.
    quotas: how many of them an epoch holds.
    """

    counts: tuple[int, ...]
    quotas: tuple[int, ...]

    @property
    def epoch_size(self) -> int:
        """Examples in one epoch."""
        return sum(self.quotas)


def whole(count: int) -> Mixture:
    """One source, each example once per epoch."""
    return Mixture((count,), (count,))


def mix(parts: Sequence[Part]) -> Mixture:
    """InputError (data.train) where weights and epochs contradict, or a source would give nothing."""
    counts = tuple(part.count for part in parts)
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        passes = [1 if part.epochs is None else part.epochs for part in parts]
        return Mixture(counts, tuple(max(1, round(p * count)) for p, count in zip(passes, counts, strict=True)))
    if len(weights) < len(parts) or any(part.epochs is not None for part in parts):
        what = "mixes sources that have a weight with sources that have epochs or neither"
        raise InputError(
            Fault(
                "data.train", what, "give every source a weight, or none; epochs: 1 is one pass", code="SF-DATA-SHARES"
            )
        )
    quotas = apportion(sum(counts), weights)
    for part, quota in zip(parts, quotas, strict=True):
        if not quota:
            what = f"the weight of {part.name} gives it none of the {sum(counts):,} examples of an epoch"
            raise InputError(
                Fault("data.train", what, "raise its weight or leave the source out", code="SF-DATA-SHARES")
            )
    return Mixture(counts, tuple(quotas))


def apportion(total: int, weights: Sequence[float], most: Sequence[int] | None = None) -> list[int]:
    """`total` as whole numbers in proportion to the weights: what rounding down leaves goes to the largest remainders.

    most: upper bounds, which together allow `total`.
    """
    bounds = [total] * len(weights) if most is None else list(most)
    exact = [total * weight / sum(weights) for weight in weights]
    found = [min(int(share), bound) for share, bound in zip(exact, bounds, strict=True)]
    by_remainder = sorted(range(len(found)), key=lambda place: found[place] - exact[place])
    while (left := total - sum(found)) > 0:
        open_places = [place for place in by_remainder if found[place] < bounds[place]]
        for place in open_places[:left]:
            found[place] += 1
    return found


# First words of a stream: each use of the seed draws from its own.
EPOCHS, HELD_OUT, SOURCES, TURNS, MINIBATCHES, ANSWERS, TEXTS, SHARES, REDRAWS, CONTROL, EVALUATIONS = range(11)


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
    # Shared with whoever asks next: sorted in place, it would change the order of the epoch.
    places.flags.writeable = False
    return places


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Optimizer steps in one pass over `count` examples; a last short batch is a step."""
    return -(-count // batch_size)


def step_examples(seed: int, step: int, mixture: Mixture, batch_size: int) -> tuple[int, np.ndarray]:
    """The epoch of a step and the places of its examples. step counts from 0 over all epochs."""
    epoch, place = divmod(step, steps_per_epoch(mixture.epoch_size, batch_size))
    return epoch, epoch_order(seed, epoch, mixture)[place * batch_size : (place + 1) * batch_size]


def uniform(seed: int, stream: tuple[int, ...], count: int) -> np.ndarray:
    """Numbers in [0, 1) that depend on seed, stream and place alone: [count] fp64."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    return (words >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, stream: tuple[int, ...], count: int) -> np.ndarray:
    """range(count) in an order that depends on seed and stream alone: [count] int64."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    # Stable: of equal words the order would else be numpy's choice, which differs between processors.
    return np.argsort(words, kind="stable")


def _walk(seed: int, source: int, count: int, start: int, length: int) -> np.ndarray:
    """`length` examples of a source's endless row of permutations, from place `start` on."""
    passes = range(start // count, -(-(start + length) // count))
    row = np.concatenate([permutation(seed, _stream(source, number), count) for number in passes])
    return row[start - passes.start * count :][:length]


def _stream(source: int, number: int) -> tuple[int, ...]:
    """The first source's passes are the epochs of a run with one source, whose order must never change."""
    return (EPOCHS, number) if source == 0 else (SOURCES, source, number)


def split(counts: Sequence[int], held_out: int | float, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each source the places to train on and the places to evaluate on, each ascending.

    counts: records of each source, which are held out in proportion; one of each stays.
    held_out: a number of records in all (int), or a share between 0 and 1 (float), rounded, at least one.

    InputError (data.eval) when nothing would be left to train on.
    """
    total = sum(counts)
    wanted = held_out if isinstance(held_out, int) else max(1, round(held_out * total))
    most = [count - 1 for count in counts]
    if wanted > sum(most):
        what = f"{held_out} holds out {wanted} of {total} records, which leaves none to train on"
        if len(counts) > 1:
            what += " from some source"
        raise InputError(
            Fault("data.eval", what, f"hold out fewer than {sum(most) + 1}, or name a file", code="SF-DATA-SHARES")
        )
    taken = apportion(wanted, counts, most)
    return [_halves(count, part, seed, source) for source, (count, part) in enumerate(zip(counts, taken, strict=True))]


def _halves(count: int, taken: int, seed: int, source: int) -> tuple[np.ndarray, np.ndarray]:
    order = permutation(seed, (HELD_OUT,) if source == 0 else (HELD_OUT, source), count)
    return np.sort(order[taken:]), np.sort(order[:taken])


def part_of(count: int, of: Sequence[float], take: int, seed: int) -> np.ndarray:
    """Places of the records of part `take` (from 1), ascending.

    count: records.
    of: relative sizes of the parts.

    All parts together have every record once, whatever a run learns from its part: they come from one shuffle, which
    depends on the seed and the number of records alone. InputError for a part without a record.
    """
    sizes = apportion(count, of)
    start = sum(sizes[: take - 1])
    if not sizes[take - 1]:
        what = f"gives none of {count} records to part {take} of {','.join(f'{size:g}' for size in of)}"
        raise InputError(Fault("share", what, "raise its size", code="SF-DATA-SHARES"))
    return np.sort(permutation(seed, (SHARES,), count)[start : start + sizes[take - 1]])
