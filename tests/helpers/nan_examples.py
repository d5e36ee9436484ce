"""Examples whose loss is NaN regardless of the weights, for tests of how a run reacts to its data."""

import math
from collections.abc import Collection
from typing import Any

import pytest

from surefoot.training import step
from surefoot.training.objective import LossSum


def spoil(names: Collection[Any], patch: pytest.MonkeyPatch) -> None:
    """Make the loss of every micro-batch with one of these records NaN from now on."""
    real, bad = step.add_gradient, set(names)

    def add_gradient(engine: Any, objective: Any, batch: Any, **keywords: Any) -> Any:
        def spoiled(model: Any, rows: Any) -> LossSum:
            out = objective(model, rows)
            return LossSum(out.loss * math.nan, out.sums)

        return real(engine, spoiled if bad & set(batch.examples) else objective, batch, **keywords)

    patch.setattr(step, "add_gradient", add_gradient)
