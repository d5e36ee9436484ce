"""A sharded model that is whole for a moment, so that whatever reads parameters can write them to files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def whole_parameters(
    model: nn.Module, whole: Callable[[nn.Parameter], torch.Tensor], *, keep: bool, frozen: bool
) -> Iterator[None]:
    """Inside, where `keep`, whole tensors on the host stand in the place of the model's parameters. whole: of one
    parameter, on all ranks at once; they come one after another, so a rank that keeps none needs room for one.
    frozen: also modules of which nothing trains. Tied parameters stay tied."""
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
