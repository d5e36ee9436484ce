"""Measure how much two computations of the same examples differ, and how much of it rounding can explain.

Three values, each of which finds errors that the others miss:

    gradient    |g' - g| / |g|, of the kind of parameters that differs most: a missing mask, a gradient of zeros.
    length      |mean of log |g'| / |g||, over the kinds: a wrong factor in a backward pass. Rounding errors are nearly
                orthogonal to a gradient and do not change its length, so the limit is much smaller.
    loss        |l' - l| / |l|. Rounding errors of single tokens cancel in the sum.

A kind is the set of parameters with the same name in every layer.
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

# The largest relative differences that rounding can explain, by dtype. Two orders of the same sums differ by some units
# in the last place, amplified by later layers. Measured: docs/evidence/fast-paths.md.
LIMITS: Mapping[DType, float] = {  # of a gradient; entirely wrong gradients are off by about 1
    "fp32": 1e-3,  # 24 bits; 2e-6 measured
    "fp16": 5e-2,  # 11 bits
    "bf16": 2.5e-1,  # 8 bits; 0.16 measured, except 0.28 in one step of a reward model with ReLUs
}
# In bf16, 0.009 at the start of a run, 0.016 for reward models; 0.03 for models that have memorized their examples,
# where the tiny remaining slope of the loss is rounded the same way everywhere.
LENGTH_LIMITS: Mapping[DType, float] = {"fp32": 1e-3, "fp16": 1.5e-2, "bf16": 5e-2}
LOSS_LIMITS: Mapping[DType, float] = {"fp32": 1e-3, "fp16": 2e-3, "bf16": 1e-2}  # 0.0008 and 0.004 measured
# A kind whose gradient is below this fraction of the largest is measured against the largest, and its length is
# ignored: a gradient that is 0 in exact arithmetic, such as that of the key bias, consists of rounding only.
_SMALL = 0.03
_NOTHING = 1e-4  # of the largest gradient: a kind with more than this that is 0 in the other pass was left out there
_NUMBER = re.compile(r"\.\d+(?=\.|$)")  # layer number in a name
_TINY = torch.finfo(torch.float32).tiny
_LARGEST = torch.finfo(torch.float32).max  # summed with other ranks' zeros; infinity * 0 would be NaN
_OF = {"gradient": "a gradient", "length": "the gradients' length", "loss": "the loss"}


@dataclass(frozen=True)
class Pass:
    """Result of one forward and backward pass.

    loss: summed over the micro-batches and all ranks.
    gradients: a sample of this rank's gradients, by name.
    """

    loss: float
    gradients: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Differences:
    """Relative differences, infinite if a value is not finite; or the limits of each."""

    gradient: float
    length: float
    loss: float

    @property
    def largest(self) -> float:
        """The larger of gradient and loss; a length differs by no more than its gradient."""
        return max(self.gradient, self.loss)

    def beyond(self, limits: Differences) -> str:
        """Describe the first value above its limit; empty if there is none."""
        for name, seen in asdict(self).items():
            if not seen <= (limit := getattr(limits, name)):
                return f"{seen:.2g} of {_OF[name]} on this model; allowed is {limit:.4g}"
        return ""


def differences(engine: Engine, plain: Pass, other: Pass) -> Differences:
    """Compare two passes; each value is the largest of any rank. A missing gradient counts as zeros. Collective."""
    squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # of g, g' and g' - g
    for name in sorted(plain.gradients.keys() | other.gradients.keys()):  # a fixed order of summation
        one, two = plain.gradients.get(name), other.gradients.get(name)
        between = one if two is None else two if one is None else two - one
        kind = squares[_NUMBER.sub("", name)]
        for place, part in enumerate((one, two, between)):
            kind[place] += 0.0 if part is None else float(part.norm()) ** 2
    gradient, length = _gradient_and_length([(g, new, between) for g, new, between in squares.values()])
    found = Differences(gradient, length, loss=_finite(abs(other.loss - plain.loss) / max(abs(plain.loss), _TINY)))
    ranks = [0.0] * (3 * engine.world)
    ranks[engine.rank :: engine.world] = [min(one, _LARGEST) for one in asdict(found).values()]
    ranks = engine.totals(ranks)
    return Differences(*(max(ranks[at : at + engine.world]) for at in range(0, len(ranks), engine.world)))


def largest_difference(engine: Engine, plain: Pass, other: Pass) -> float:
    """The larger difference of gradient and loss, where one number is enough, as in fp32. Collective."""
    return differences(engine, plain, other).largest


def limits_in(compute: DType) -> Differences:
    """Limits of rounding for products in this dtype."""
    return Differences(LIMITS[compute], LENGTH_LIMITS[compute], LOSS_LIMITS[compute])


def _gradient_and_length(squares: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Return gradient and length of `Differences`. squares: of g, g' and g' - g, by kind."""
    if not all(math.isfinite(one) for kind in squares for one in kind):
        return math.inf, math.inf
    largest = max((g for g, _, _ in squares), default=0.0)
    if any((g == 0) != (new == 0) and max(g, new) > _NOTHING**2 * largest for g, new, _ in squares):
        return math.inf, math.inf
    floor = max(_SMALL**2 * largest, _TINY)
    gradient = max((math.sqrt(between / max(g, floor)) for g, _, between in squares), default=0.0)
    return gradient, _length_difference([(g, new) for g, new, _ in squares if g >= floor])


def _length_difference(squares: Sequence[tuple[float, float]]) -> float:
    """squares: of g and g', by kind."""
    if any(not 0 < other < math.inf for _, other in squares):
        return math.inf
    logs = [math.log(other / g) / 2 for g, other in squares]
    return _finite(abs(math.fsum(logs)) / max(len(logs), 1))


def _finite(share: float) -> float:
    return share if math.isfinite(share) else math.inf
