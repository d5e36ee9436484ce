"""Learning rate as a pure function of the step: nothing to save, nothing that can drift on resume.

Steps count from 0. During warm-up the rate rises linearly and reaches its peak at step `warmup`; the first step
already moves, unless the curve shall begin at 0 as transformers' does. Then, with
p = (step - warmup) / (total - warmup):

    constant  peak
    linear    peak * (1 - p)
    cosine    peak * (1 + cos(pi p)) / 2
    wsd       peak, then linearly towards 0 over the last `decay` steps
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

_AFTER_WARMUP: dict[str, Callable[[float], float]] = {
    "constant": lambda p: 1.0,
    "linear": lambda p: 1.0 - p,
    "cosine": lambda p: 0.5 * (1.0 + math.cos(math.pi * p)),
}


@dataclass(frozen=True)
class Schedule:
    """kind: cosine | linear | constant | wsd. peak: highest rate. total, warmup, decay: optimizer steps. from_zero: the
    warm-up begins at rate 0."""

    kind: str
    peak: float
    total: int
    warmup: int
    decay: int = 0
    from_zero: bool = False

    def rate(self, step: int) -> float:
        """Learning rate of the update number `step`, counted from 0."""
        if step < self.warmup:
            return self.peak * (step / self.warmup if self.from_zero else (step + 1) / (self.warmup + 1))
        if self.kind == "wsd":
            return self.peak * min(1.0, (self.total - step) / (self.decay + 1))
        return self.peak * _AFTER_WARMUP[self.kind]((step - self.warmup) / max(1, self.total - self.warmup))
