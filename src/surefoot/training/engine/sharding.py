"""What engines share that give each rank a part of every parameter: which optimizers they refuse, and how a sharded
model becomes whole for a moment, so that whatever reads parameters can write them to files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

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


@contextmanager
def whole_parameters(
    model: nn.Module, whole: Callable[[nn.Parameter], torch.Tensor], *, keep: bool, frozen: bool
) -> Iterator[None]:
    """Inside, where `keep`, whole tensors on the host stand in the place of the model's parameters.

    whole: of one parameter, on all ranks at once; they come one after another, so a rank that keeps none needs room for
        one.
    frozen: also modules of which nothing trains. Tied parameters stay tied.
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
