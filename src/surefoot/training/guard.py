"""Look at loss and gradient norm before the optimizer moves.

A non-finite step changes neither weights nor moments and is logged as what it is. An fp16 overflow under a finite loss
is the loss scale's business while the scale can still fall; it is counted apart.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from surefoot.training.report import Decision


@dataclass(frozen=True)
class Verdict:
    decision: Decision
    non_finite: Literal["loss", "grad_norm"] | None


def judge(loss: float, grad_norm: float, scale_can_fall: bool) -> Verdict:
    """loss, grad_norm: means over the optimizer step, unscaled. scale_can_fall: an fp16 loss scale above its floor."""
    if not math.isfinite(loss):
        return Verdict("non_finite", "loss")
    if not math.isfinite(grad_norm):
        return Verdict("scaler" if scale_can_fall else "non_finite", "grad_norm")
    return Verdict("stepped", None)


@dataclass(frozen=True)
class GuardCounts:
    """consecutive: non-finite steps in a row now. skipped, scaler: totals of the run. Steps that a stage held back were
    never looked at, and count nothing."""

    consecutive: int = 0
    skipped: int = 0
    scaler: int = 0

    def after(self, decision: Decision) -> GuardCounts:
        if decision == "stepped":
            return GuardCounts(0, self.skipped, self.scaler)
        if decision == "held":
            return self
        if decision == "scaler":
            return GuardCounts(self.consecutive, self.skipped, self.scaler + 1)
        return GuardCounts(self.consecutive + 1, self.skipped + 1, self.scaler)
