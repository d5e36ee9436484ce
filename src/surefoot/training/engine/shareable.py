"""What engines that hand each rank a share of every parameter cannot do; the plan refuses it before."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.system.errors import Fault, InputError
from surefoot.training.optimizer import Optimizer, parts_of


def elementwise(optimizer: Optimizer, engine: str) -> Optimizer:
    """The same, where it treats every number alone. Raises InputError for one that needs whole matrices (muon,
    adafactor) or blocks (8-bit moments): of shares it would make another step than one process does."""
    for part in parts_of(optimizer):
        if not isinstance(part, torch.optim.AdamW | torch.optim.SGD):
            what = f"{type(part).__name__} works on whole matrices or blocks, and {engine} gives it shares of them"
            raise InputError(
                Fault("optim.name", what, "use adamw or sgd, or parallel.engine: ddp", code="SF-CONFIG-CONFLICT")
            )
    return optimizer


def require_shareable(model: nn.Module, engine: str) -> None:
    """Raises InputError for quantised weights."""
    packed = next((name for name, one in model.named_parameters() if not one.is_floating_point()), None)
    if packed is not None:
        what = f"{engine} cannot share out quantised weights, such as {packed}"
        raise InputError(Fault("parallel.engine", what, "use ddp, or precision.base: auto", code="SF-CONFIG-CONFLICT"))
