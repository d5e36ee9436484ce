"""What a training method is: a function from model and batch to sums.

Sums, never means: the step divides by the weight of the whole optimizer step, so that accumulation, padding and
the number of ranks cannot change the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from surefoot.data.batch import Batch


@dataclass(frozen=True)
class LossSum:
    """loss: scalar, summed over the batch's weight, differentiable. sums: detached scalars to be divided by weight."""

    loss: torch.Tensor
    sums: Mapping[str, torch.Tensor] = field(default_factory=dict)


Objective = Callable[[nn.Module, Batch], LossSum]
