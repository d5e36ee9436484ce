"""Data order: which examples each step sees, as a pure function of seed and step. There is no sampler state to save.

A mixture gives the number of examples of each source per epoch. Without weights, each source contributes `epochs`
passes over itself (default 1). With weights, an epoch is as long as all sources together and is divided by weight. The
counts are integers and the same in every epoch, so the number of steps per epoch is known in advance.

Each source is read as an endless sequence of permutations, so no example repeats before all others of its source were
seen. An epoch takes the next examples of each source, and a permutation of the epoch interleaves the sources. With one
source and whole epochs, that is one permutation per epoch. Held-out records and shares are drawn the same way.

Permutations are made from Philox's raw words, which numpy guarantees bit for bit on all platforms and in all releases;
it does not guarantee `Generator.permutation`. A resumed run computes step n directly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Part:
    """One source of a mixture.

    name: name for messages.
    count: number of examples.
    weight, epochs: as configured; None if not set.
    """

    name: str
    count: int
    weight: float | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class Mixture:
    """The number of examples of each source per epoch.

    counts: examples of each source; the sources are concatenated.
    quotas: examples of each source per epoch.
    shuffled: whether every epoch has an order of its own; else that of the files, one source after the other.
    """

    counts: tuple[int, ...]
    quotas: tuple[int, ...]
    shuffled: bool = True

    @property
    def epoch_size(self) -> int:
        """Examples in one epoch."""
        return sum(self.quotas)


def whole(count: int, *, shuffled: bool = True) -> Mixture:
    """Return the mixture of one source, with each example once per epoch."""
    return Mixture((count,), (count,), shuffled)


def mix(parts: Sequence[Part]) -> Mixture:
    """Compute the mixture of several sources. Raises InputError (data.train) if weights and epochs are combined, or a
    source would contribute no example."""
    counts = tuple(part.count for part in parts)
    weights = [part.weight for part in parts if part.weight is not None]
    if not weights:
        passes = [1 if part.epochs is None else part.epochs for part in parts]
        return Mixture(counts, tuple(max(1, round(p * count)) for p, count in zip(passes, counts, strict=True)))
    if len(weights) < len(parts) or any(part.epochs is not None for part in parts):
        what = "has sources with a weight together with sources without one or with epochs"
        raise InputError(Fault("data.train", what, "set a weight for every source, or for none", code="SF-DATA-SHARES"))
    quotas = apportion(sum(counts), weights)
    for part, quota in zip(parts, quotas, strict=True):
        if not quota:
            what = f"the weight of {part.name} is too small for one of the {sum(counts):,} examples of an epoch"
            raise InputError(Fault("data.train", what, "raise its weight or remove the source", code="SF-DATA-SHARES"))
    return Mixture(counts, tuple(quotas))


def apportion(total: int, weights: Sequence[float], most: Sequence[int] | None = None) -> list[int]:
    """Split `total` into integers in proportion to the weights, by the largest-remainder method.

    most: upper bounds, which add up to at least `total`; None: no bounds.
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


# First number of a random stream's key: each use of the seed has its own stream.
EPOCHS, HELD_OUT, SOURCES, TURNS, MINIBATCHES, ANSWERS, TEXTS, SHARES, REDRAWS, CONTROL, EVALUATIONS = range(11)
OWN, ROWS = 11, 12


@functools.lru_cache(maxsize=4)  # the current epoch and the next, which is prefetched near the border
def epoch_order(seed: int, epoch: int, mixture: Mixture) -> np.ndarray:
    """Return the example indices of one epoch (from 0) into the concatenated sources, in order: [mixture.epoch_size]
    int64, read-only."""
    places = np.empty(mixture.epoch_size, dtype=np.int64)
    turns = np.repeat(np.arange(len(mixture.quotas)), mixture.quotas)
    if len(mixture.quotas) > 1 and mixture.shuffled:
        turns = turns[permutation(seed, (TURNS, epoch), mixture.epoch_size)]
    first = 0
    for source, (count, quota) in enumerate(zip(mixture.counts, mixture.quotas, strict=True)):
        own = _walk(seed, source, count, epoch * quota, quota) if mixture.shuffled else np.arange(quota)
        places[turns == source] = first + own % count
        first += count
    # The array is cached: modifying it would change the order of the epoch for later callers.
    places.flags.writeable = False
    return places


def steps_per_epoch(count: int, batch_size: int) -> int:
    """Return the optimizer steps of one pass over `count` examples; a short last batch counts as a step."""
    return -(-count // batch_size)


def step_examples(seed: int, step: int, mixture: Mixture, batch_size: int) -> tuple[int, np.ndarray]:
    """Return the epoch of a step and the indices of its examples. Steps count from 0 over all epochs."""
    epoch, place = divmod(step, steps_per_epoch(mixture.epoch_size, batch_size))
    return epoch, epoch_order(seed, epoch, mixture)[place * batch_size : (place + 1) * batch_size]


def filled_rows(seed: int, mixture: Mixture, lengths: np.ndarray, room: int) -> tuple[np.ndarray, ...]:
    """Divide the examples into rows of at most `room` tokens, unless a single example has more. Returns the example
    indices of each row. Shuffled with the seed, each goes to the first row with room for it (first fit); in the order
    of the files, to the last row or, without room there, into a new one (next fit).

    lengths: tokens of each example, over the concatenated sources.

    Raises InputError (batch.row_tokens) if an epoch has some examples more or less than once: the rows are the same in
    every epoch.
    """
    if mixture.counts != mixture.quotas:
        what = "rows have every example once, but sources have a weight or epochs of their own"
        raise InputError(Fault("batch.row_tokens", what, "leave one of them out", code="SF-DATA-SHARES"))
    if not mixture.shuffled:
        return _in_turn(lengths, room)
    rows: list[list[int]] = []
    free = _FreeRoom(room)
    for index in permutation(seed, (ROWS,), len(lengths)).tolist():
        place = free.take(int(lengths[index]))
        if place == len(rows):
            rows.append([])
        rows[place].append(index)
    return tuple(np.array(row) for row in rows)


def _in_turn(lengths: np.ndarray, room: int) -> tuple[np.ndarray, ...]:
    starts, used = [0], 0
    for index, tokens in enumerate(lengths.tolist()):
        if used + tokens > room and index > starts[-1]:
            starts.append(index)
            used = 0
        used += tokens
    return tuple(np.split(np.arange(len(lengths)), starts[1:]))


class _FreeRoom:
    """The free tokens of rows, in a tree whose nodes hold the most of their halves: the first row with room is found in
    log(rows) steps instead of rows steps."""

    def __init__(self, room: int):
        self.room, self.size, self.most = room, 1, [room, room]  # node 1 is the root, nodes 2n and 2n + 1 its halves

    def take(self, tokens: int) -> int:
        """Return the first row with room for so many tokens and take it; longer examples have a row of their own."""
        wanted = min(tokens, self.room)
        if self.most[1] < wanted:
            self._double()
        node = 1
        while node < self.size:
            node = 2 * node if self.most[2 * node] >= wanted else 2 * node + 1
        place = node - self.size
        self.most[node] -= wanted
        while node := node // 2:
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])
        return place

    def _double(self) -> None:
        leaves = [*self.most[self.size :], *([self.room] * self.size)]
        self.size *= 2
        self.most = [0] * self.size + leaves
        for node in range(self.size - 1, 0, -1):
            self.most[node] = max(self.most[2 * node], self.most[2 * node + 1])


def uniform(seed: int, stream: tuple[int, ...], count: int) -> np.ndarray:
    """Draw uniform numbers in [0, 1) that depend only on seed, stream and position: [count] fp64."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    # The 53 bits of a float64's significand, so that every result is exact and below 1.
    return (words >> np.uint64(11)) * 2.0**-53


def permutation(seed: int, stream: tuple[int, ...], count: int) -> np.ndarray:
    """Shuffle range(count) in an order that depends only on seed and stream: [count] int64."""
    words = np.random.Philox(np.random.SeedSequence(seed, spawn_key=stream)).random_raw(count)
    # With an unstable sort, the order of equal words would depend on the CPU.
    return np.argsort(words, kind="stable")


def _walk(seed: int, source: int, count: int, start: int, length: int) -> np.ndarray:
    """Return `length` examples of a source's endless sequence of permutations, from position `start`."""
    passes = range(start // count, -(-(start + length) // count))
    row = np.concatenate([permutation(seed, _stream(source, number), count) for number in passes])
    return row[start - passes.start * count :][:length]


def _stream(source: int, number: int) -> tuple[int, ...]:
    """Return the random stream of one pass over a source. The first source uses the stream of single-source runs, whose
    order must never change."""
    return (EPOCHS, number) if source == 0 else (SOURCES, source, number)


def split(counts: Sequence[int], held_out: int | float, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Split each source's records into indices for training and for evaluation, each ascending.

    counts: records of each source; they are held out in proportion, and at least one of each source is kept.
    held_out: total number of records (int), or a share between 0 and 1 (float), rounded, at least one record.

    Raises InputError (data.eval) if nothing would be left to train on.
    """
    total = sum(counts)
    wanted = held_out if isinstance(held_out, int) else max(1, round(held_out * total))
    most = [count - 1 for count in counts]
    if wanted > sum(most):
        what = f"{held_out} holds out {wanted} of {total} records, which leaves none to train on"
        if len(counts) > 1:
            what += " in some source"
        fix = f"hold out at most {sum(most)}, or set a file" if any(most) else "set a file"
        raise InputError(Fault("data.eval", what, fix, code="SF-DATA-SHARES"))
    taken = apportion(wanted, counts, most)
    return [_halves(count, part, seed, source) for source, (count, part) in enumerate(zip(counts, taken, strict=True))]


def _halves(count: int, taken: int, seed: int, source: int) -> tuple[np.ndarray, np.ndarray]:
    order = permutation(seed, (HELD_OUT,) if source == 0 else (HELD_OUT, source), count)
    return np.sort(order[taken:]), np.sort(order[:taken])


def part_of(count: int, of: Sequence[float], take: int, seed: int | None) -> np.ndarray:
    """Return the record indices of part `take` (from 1), ascending.

    count: number of records.
    of: relative sizes of the parts.
    seed: None: the records stay in order, and a border is rounded as `datasets` rounds that of train[:95%].

    The parts are disjoint and together contain every record: they are slices of one shuffle, which depends only on the
    seed and the number of records. Raises InputError for a part without a record.
    """
    if seed is None:
        start, end = (round(count * sum(of[:parts]) / sum(of)) for parts in (take - 1, take))
    else:
        sizes = apportion(count, of)
        start = sum(sizes[: take - 1])
        end = start + sizes[take - 1]
    if start == end:
        what = f"leaves part {take} of {','.join(f'{size:g}' for size in of)} without any of the {count} records"
        raise InputError(Fault("share", what, "make the part larger", code="SF-DATA-SHARES"))
    return np.arange(start, end) if seed is None else np.sort(permutation(seed, (SHARES,), count)[start:end])
