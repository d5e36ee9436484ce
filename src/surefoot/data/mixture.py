"""How many examples of each source an epoch holds.

Without weights a source gives `epochs` passes of itself, one if it says nothing. With weights an epoch is as long as
all sources together and is shared out by weight. Numbers are whole and equal in every epoch, so steps per epoch are
known before the first; which examples make up a part of a source is decided in `surefoot.data.order`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Part:
    """One source. name: for messages. count: its examples. weight, epochs: as asked for; None: not asked."""

    name: str
    count: int
    weight: float | None = None
    epochs: float | None = None


@dataclass(frozen=True)
class Mixture:
    """counts: examples of each source, which lie one after the other. quotas: how many of them an epoch holds."""

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
