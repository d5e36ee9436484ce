"""By how much two ways to compute the same examples differ, and how far rounding lets them.

Three numbers, as each sees what the others do not:

    gradient    |g' - g| / |g|, of the kind of parameters that differs most: a missing mask, a gradient of zeros.
    length      |mean of log |g'| / |g||, over the kinds: a factor of a backward pass. What rounds points anywhere,
                nearly at right angles to a gradient, and makes it no longer, so this may be much smaller.
    loss        |l' - l| / |l|. Rounding of single tokens goes both ways, and the sum hardly knows it.

A kind is what has the same name in every layer.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from surefoot.planning.plan import DType
from surefoot.training.engine import Engine

# The largest share of each that is still rounding, by type. Two orders of the same sums differ by some units in the
# last place, times what the layers behind them make of it. Measured: docs/evidence/fast-paths.md.
LIMITS: Mapping[DType, float] = {  # of a gradient; what is computed wrongly altogether is off by a share of 1
    "fp32": 1e-3,  # 24 bits; 2e-6 seen
    "fp16": 5e-2,  # 11 bits
    "bf16": 2.5e-1,  # 8 bits; 0.16 seen, but for one step of a reward model with ReLUs, at 0.28
}
# In bf16 0.009 where a run begins, 0.016 of reward models; 0.03 of models that know their examples by heart, where all
# that is left of the loss's slope is rounded alike.
LENGTH_LIMITS: Mapping[DType, float] = {"fp32": 1e-3, "fp16": 1.5e-2, "bf16": 5e-2}
LOSS_LIMITS: Mapping[DType, float] = {"fp32": 1e-3, "fp16": 2e-3, "bf16": 1e-2}  # 0.0008 and 0.004 seen
# A kind whose gradient is below this share of the largest one is measured against that, and its length is not looked
# at: what is 0 in exact arithmetic, as that of the keys' bias, is nothing but rounding.
_SMALL = 0.03
_NOTHING = 1e-4  # of the largest gradient: a kind that has more, and none at all the other way, was left out there
_NUMBER = re.compile(r"\.\d+(?=\.|$)")  # of a layer, in a name
_TINY = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max  # infinity times another rank's 0 is not a number
_OF = {"gradient": "a gradient", "length": "the gradients' length", "loss": "the loss"}


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass.

    loss: summed over the micro-batches and all ranks.
    gradients: by name, a sample of this rank's.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Differences:
    """As shares, infinite where something is not a number; or the most that is allowed of each."""

    gradient: float
    length: float
    loss: float

    @property
    def largest(self) -> float:
        """Of gradient and loss; a length differs by no more than its gradient does."""
        return max(self.gradient, self.loss)

    def beyond(self, limits: Differences) -> str:
        """Of the first that is above its limit, in words; empty where none is."""
        for name, seen in asdict(self).items():
            if not seen <= (limit := getattr(limits, name)):
                return f"{seen:.2g} of {_OF[name]} on this model; allowed is {limit:.4g}"
        return ""


def differences(engine: Engine, plain: Pass, other: Pass) -> Differences:
    """Each the largest of any rank. A parameter without a gradient has one of zeros."""
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # of g, of g' and of what is between them
    for name in sorted(plain.gradients.keys() | other.gradients.keys()):  # sums in one order
        one, two = plain.gradients.get(name), other.gradients.get(name)
        between = one if two is None else two if one is None else two - one
        kind = squares[_NUMBER.sub("", name)]
        for place, part in enumerate((one, two, between)):
            kind[place] += 0.0 if part is None else float(part.norm()) ** 2
    gradient, length = _of_gradients([(g, new, between) for g, new, between in squares.values()])
    found = Differences(gradient, length, loss=_finite(abs(other.loss - plain.loss) / max(abs(plain.loss), _TINY)))
    ranks = [0.0] * (3 * engine.world)
    ranks[engine.rank :: engine.world] = [min(one, _LARGEST) for one in asdict(found).values()]
    ranks = engine.totals(ranks)
    return Differences(*(max(ranks[at : at + engine.world]) for at in range(0, len(ranks), engine.world)))


def largest_difference(engine: Engine, plain: Pass, other: Pass) -> float:
    """Where one number is enough, as in fp32: every rank must ask."""
    return differences(engine, plain, other).largest


def limits_in(compute: DType) -> Differences:
    """What rounding allows in products of this type."""
    return Differences(LIMITS[compute], LENGTH_LIMITS[compute], LOSS_LIMITS[compute])


def _of_gradients(squares: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """squares: of g, of g' and of what is between them, by kind. Gradient and length of `Differences`."""
    if not all(math.isfinite(one) for kind in squares for one in kind):
        return math.inf, math.inf
    largest = max((g for g, _, _ in squares), default=0.0)
    if any((g == 0) != (new == 0) and max(g, new) > _NOTHING**2 * largest for g, new, _ in squares):
        return math.inf, math.inf
    floor = max(_SMALL**2 * largest, _TINY)
    gradient = max((math.sqrt(between / max(g, floor)) for g, _, between in squares), default=0.0)
    return gradient, _longer([(g, new) for g, new, _ in squares if g >= floor])


def _longer(squares: Sequence[tuple[float, float]]) -> float:
    """squares: of g and of g', by kind."""
    if any(not 0 < other < math.inf for _, other in squares):
        return math.inf
    logs = [math.log(other / g) / 2 for g, other in squares]
    return _finite(abs(math.fsum(logs)) / max(len(logs), 1))


def _finite(share: float) -> float:
    return share if math.isfinite(share) else math.inf
