"""Look at loss, gradient norm and moments before the optimizer moves.

A non-finite step changes neither weights nor moments and is logged as what it is. An fp16 overflow under a finite loss
is the loss scale's business while the scale can still fall; it is counted apart. A finite norm far above those before
is the business of `spikes`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from surefoot.training.report import Decision


@dataclass(frozen=True)
class Verdict:
    decision: Decision
    non_finite: Literal["loss", "grad_norm", "moment"] | None


def judge(loss: float, grad_norm: float, scale_can_fall: bool, bad_moment: bool = False) -> Verdict:
    """loss, grad_norm: means over the optimizer step, unscaled. scale_can_fall: an fp16 loss scale above its floor.
    bad_moment: one of the optimizer is not finite, and would spoil the weights."""
    if not math.isfinite(loss):
        return Verdict("non_finite", "loss")
    if not math.isfinite(grad_norm):
        return Verdict("scaler" if scale_can_fall else "non_finite", "grad_norm")
    return Verdict("non_finite", "moment") if bad_moment else Verdict("stepped", None)


RECENT = 300  # steps


@dataclass(frozen=True)
class GuardCounts:
    """consecutive: non-finite steps in a row now. recent: those among the last RECENT steps, by number, that count.
    skipped, scaler, spikes: totals of the run. Steps that a stage held back were never looked at, and count nothing."""

    consecutive: int = 0
    skipped: int = 0
    scaler: int = 0
    spikes: int = 0
    recent: tuple[int, ...] = ()

    def after(self, step: int, decision: Decision, *, spiked: bool = False, since: int = 0) -> GuardCounts:
        """since: steps up to this one count no longer."""
        recent = tuple(one for one in self.recent if one > max(step - RECENT, since))
        if decision == "stepped":
            return replace(self, consecutive=0, spikes=self.spikes + spiked, recent=recent)
        if decision == "held":
            return replace(self, recent=recent)
        if decision == "scaler":
            return replace(self, scaler=self.scaler + 1, recent=recent)
        return replace(self, consecutive=self.consecutive + 1, skipped=self.skipped + 1, recent=(*recent, step))
