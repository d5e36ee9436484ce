"""The fast path "gated": the gated activation of MLPs, act(gate(x)) up(x), with `surefoot.kernels.liger`, on a GPU.

An MLP is recognized by its result, not by name: the forward of its class is run with small stand-ins for its three
projections, and must compute the formula with SiLU or with GELU in its tanh form. Modules, parameters and hooks do not
change; only `forward` is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.kernels import liger
from surefoot.kernels.liger import FORMS, Gate
from surefoot.models.fast import FastPath, Undo, give_forwards
from surefoot.models.peft import LoraLinear
from surefoot.planning.fast_paths import PROJECTIONS
from surefoot.system.libraries import is_installed

NAME = "gated"
_CLOSE = 1e-5  # relative difference between two fp32 computations of one formula; the two forms of GELU differ by 1e-4


def gated_path() -> FastPath:
    return FastPath(NAME, install, obstacle, "liger")


def install(model: nn.Module) -> Undo:
    """Give every MLP with a supported formula the fast forward; return the undo function."""
    return give_forwards(list(_mlps(model)))


def obstacle(model: nn.Module) -> str:
    """Return why the path cannot be installed in this model; "" if it can."""
    found = next(_mlps(model), None)
    return without_liger() or ("" if found else "none of its MLPs computes down(act(gate(x)) up(x)) with SiLU or GELU")


def without_liger() -> str:
    """Return why Liger's kernels cannot be used; "" if they can."""
    return "" if is_installed("liger_kernel") else "liger-kernel is not installed"


class _Mlp:
    """An MLP with its fast forward, a bound method of this object, so that copying a model copies it too."""

    def __init__(self, module: nn.Module, names: tuple[str, str, str], form: Gate):
        self.module = module
        self.names = names
        self.form: Gate = form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        others = [child for name, child in self.module.named_children() if name not in self.names]
        if any(map(_is_watched, others)):  # their hooks would not fire
            return type(self.module).forward(self.module, x)
        gate, up, down = (getattr(self.module, name) for name in self.names)
        overwrite = keeps_no_output(gate) and keeps_no_output(up)
        return down(liger.gated(gate(x), up(x), self.form, overwrite=overwrite))


def keeps_no_output(projection: nn.Module) -> bool:
    """Whether nothing keeps the projection's output, as far as its type says: neither a hook nor its own backward pass.
    DoRA's keeps it, for the gradient of the magnitudes (`surefoot.kernels.adapters`)."""
    if any(_is_watched(module) for module in projection.modules()):
        return False
    if type(projection) is LoraLinear:
        return not projection.lora_variant and type(projection.get_base_layer()) is nn.Linear
    return type(projection) is nn.Linear


def _is_watched(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _mlps(model: nn.Module) -> Iterator[_Mlp]:
    for module in model.modules():
        if "forward" not in vars(module) and (found := gated_form(module)) is not None:
            yield _Mlp(module, *found)


@torch.no_grad()
def gated_form(module: nn.Module) -> tuple[tuple[str, str, str], Gate] | None:
    """Return the names of gate, up and down and the activation, tested on a few rows; None if the module is not such an
    MLP."""
    children = dict(module.named_children())
    names = next((some for some in PROJECTIONS if children.keys() >= set(some)), None)
    if names is None:
        return None
    others = {name: child for name, child in children.items() if name not in names}
    if any(isinstance(child, nn.Dropout) or list(child.parameters()) for child in others.values()):
        return None
    draws = torch.Generator().manual_seed(0)
    rows, *weights = (torch.randn(*shape, generator=draws) for shape in ((5, 8), (24, 8), (24, 8), (8, 24)))
    gate, up, down = (partial(F.linear, weight=weight) for weight in weights)
    stand_in = SimpleNamespace(**others, **dict(zip(names, (gate, up, down), strict=True)))
    try:
        found = type(module).forward(stand_in, rows)  # pyright: ignore[reportArgumentType]
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    if not isinstance(found, torch.Tensor):
        return None
    for form in FORMS:
        wanted = down(liger.plain_gated(gate(rows), up(rows), form))
        if found.shape == wanted.shape and bool((found - wanted).norm() <= _CLOSE * wanted.norm()):
            return names, form
    return None
