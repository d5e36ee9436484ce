"""What a training method is: a function from model and batch to sums.

Sums, never means: the step divides by the weight of the whole optimizer step, so that accumulation, padding and
the number of ranks cannot change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class LossSum:
    """What an objective makes of a batch.

    loss: scalar, summed over the batch's weight, differentiable.
    sums: detached scalars to be divided by weight; in training they are logged with the step, in evaluation with its
        result.
    tables: in evaluation only, detached sums of more than one number, such as the pairs of every bin, [rows, columns];
        they add up over batches.
    """

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tables: Mapping[str, torch.Tensor] = field(default_factory=dict)


Objective = Callable[[nn.Module, Any], LossSum]  # the batch: a `Weighted` of the stage's own kind
