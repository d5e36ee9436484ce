"""Gated activations of a model, silu(gate) up, by `surefoot.kernels.pointwise`. Part of the fast path "pointwise".

Which modules have one is found by trying: the forward of the module's class is called with small layers of our own in
place of the module's, and has to return what the formula says. So neither the sizes of the real layers nor their
adapters and dropout take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.kernels.forms import Gates
from surefoot.kernels.pointwise import gated

# What families call the layers before the activation (two, or one for both halves), and the activation.
_BEFORE = (("gate_proj", "up_proj"), ("gate_up_proj",))
_ACTIVATIONS = ("act_fn", "activation_fn")
_BEHIND = "down_proj"
_WIDTH = 8
_CLOSE = 1e-5  # between two ways to compute the same in fp32; what is another formula is off by a share of 1


class Gate:
    """A module with its fast forward. Bound to the module as a method of this object, a copy of the model gets
    copies."""

    def __init__(self, module: nn.Module, before: tuple[str, ...], by: Gates):
        self.module = module
        self.before = before
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [self.module.get_submodule(name)(x) for name in self.before]
        gate, up = made if len(made) == 2 else made[0].chunk(2, dim=-1)
        return self.module.get_submodule(_BEHIND)(gated(gate, up, self.by))


def gates(model: nn.Module, by: Gates) -> Iterator[Gate]:
    """Of the modules that have none of their own yet."""
    known: dict[Any, bool] = {}
    for module in model.modules():
        plain, names = type(module).forward, {name for name, _ in module.named_children()}
        before = next((before for before in _BEFORE if names >= {*before, _BEHIND}), None)
        activation = next((name for name in _ACTIVATIONS if callable(getattr(module, name, None))), None)
        if before is None or activation is None or "forward" in vars(module) or not isinstance(plain, FunctionType):
            continue
        function = getattr(module, activation)
        if known.setdefault((plain, type(function)), _is_usual(plain, before, activation, function)):
            yield Gate(module, before, by)


@torch.no_grad()
def _is_usual(plain: FunctionType, before: tuple[str, ...], name: str, activation: Callable[..., Any]) -> bool:
    """Whether this forward multiplies by silu of the gate and does nothing else between its layers."""
    draws = torch.Generator().manual_seed(0)
    matrices = {
        layer: torch.randn(_WIDTH, 2 * _WIDTH if len(before) == 1 and layer != _BEHIND else _WIDTH, generator=draws)
        for layer in (*before, _BEHIND)
    }
    layers = {layer: lambda x, matrix=matrix: x @ matrix for layer, matrix in matrices.items()}
    x = torch.randn(3, 1, _WIDTH, generator=draws)
    try:
        found = plain(SimpleNamespace(**layers, **{name: activation}), x)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    made = [layers[layer](x) for layer in before]
    gate, up = made if len(made) == 2 else made[0].chunk(2, dim=-1)
    wanted = layers[_BEHIND](F.silu(gate) * up)
    return (
        isinstance(found, torch.Tensor)
        and found.shape == wanted.shape
        and bool((found - wanted).norm() <= _CLOSE * wanted.norm())
    )
