"""Training objectives: functions from model and batch to sums.

They return sums, never means: the step divides by the total weight of the optimizer step, so that gradient
accumulation, padding and the number of ranks do not change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LossSum:
    """The result of an objective on one batch.

    loss: differentiable scalar, summed (not averaged) over the batch's units of weight.
    sums: detached scalars that are divided by the weight and logged with the training step or the evaluation.
    tables: in evaluation only, detached tensors [rows, columns] that are summed over batches, such as counts per bin.
    """

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict)


Objective = Callable[[nn.Module, Any], LossSum]  # the batch is a `Weighted` of the method's own type
