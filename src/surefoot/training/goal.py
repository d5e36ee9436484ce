"""Which evaluation result decides the best checkpoint and early stopping: the loss, which should fall, or a metric,
which should rise. A metric of few examples ties often: then the lower evaluation loss decides, and where that is the
same too, the earlier step stays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from surefoot.training.report import EvalReport

LOSS = "loss"


@dataclass(frozen=True)
class Goal:
    """name: "loss", or one of the evaluation's metrics."""

    name: str = LOSS

    def value(self, report: EvalReport) -> float:
        return report.loss if self.name == LOSS else report.metrics[self.name]

    def loss_of(self, report: EvalReport) -> float | None:
        """What decides a tie: the evaluation loss beside a metric; None where it is the value itself, or not finite."""
        return report.loss if self.name != LOSS and math.isfinite(report.loss) else None

    def gain(self, value: float, best: float | None) -> float:
        """By how much `value` is better than the best so far; infinite for the first, NaN or negative for no gain."""
        if not math.isfinite(value):
            return -math.inf
        if best is None:
            return math.inf
        return best - value if self.name == LOSS else value - best
