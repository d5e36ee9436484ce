"""Helpers of the sharding engines: which optimizers and models they support, and how to gather full parameters
temporarily, so that code that reads parameters can save them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from surefoot.system.errors import Fault, InputError
from surefoot.training.optimizer import Optimizer, parts_of


def elementwise(optimizer: Optimizer, engine: str) -> Optimizer:
    """Return the optimizer if it is elementwise. Raises InputError for one that needs whole matrices (muon, adafactor)
    or blocks (8-bit moments): on shards its update would differ from that of a single process."""
    for part in parts_of(optimizer):
        if not isinstance(part, torch.optim.AdamW | torch.optim.RMSprop | torch.optim.SGD):
            what = f"{type(part).__name__} needs whole matrices or blocks, but {engine} shards them"
            raise InputError(
                Fault(
                    "optim.name", what, "use adamw, rmsprop or sgd, or parallel.engine: ddp", code="SF-CONFIG-CONFLICT"
                )
            )
    return optimizer


def require_shareable(model: nn.Module, engine: str) -> None:
    """Raises InputError for quantized weights."""
    packed = next((name for name, one in model.named_parameters() if not one.is_floating_point()), None)
    if packed is not None:
        what = f"{engine} cannot shard quantized weights, such as {packed}"
        raise InputError(Fault("parallel.engine", what, "use ddp, or precision.base: auto", code="SF-CONFIG-CONFLICT"))


@contextmanager
def whole_parameters(
    model: nn.Module, whole: Callable[[nn.Parameter], torch.Tensor], *, keep: bool, frozen: bool
) -> Iterator[None]:
    """Context in which the model's parameters are replaced by full tensors on the CPU, if `keep`.

    whole: collective that gathers one parameter; called for one after another, so a rank with `keep` False needs memory
        for one parameter only.
    frozen: also gather modules without trainable parameters. Tied parameters stay tied.
    """
    former: list[tuple[nn.Module, str, nn.Parameter]] = []
    made: dict[int, nn.Parameter | None] = {}
    for module in model.modules():
        own = list(module.named_parameters(recurse=False, remove_duplicate=False))
        if not (frozen or any(parameter.requires_grad for _, parameter in own)):
            continue
        for name, parameter in own:
            if id(parameter) not in made:
                tensor = whole(parameter)
                made[id(parameter)] = nn.Parameter(tensor.cpu(), parameter.requires_grad) if keep else None
            if keep:
                former.append((module, name, parameter))
    try:
        for module, name, parameter in former:
            module._parameters[name] = made[id(parameter)]
        yield
    finally:
        for module, name, parameter in former:
            module._parameters[name] = parameter
