"""The fast paths "pointwise" and "rotary": on a CPU RMSNorm and rotary embeddings with `surefoot.kernels.pointwise`, as
one path; on a GPU with `surefoot.kernels.liger`, as two.

Modules are recognized by their results, not by name: a module with a single weight vector is an RMSNorm if it computes
the formula, and attention layers are supported if the rotation function that they call computes the usual formula.
Modules, parameters and hooks do not change; only `forward` is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from surefoot.kernels import liger
from surefoot.kernels.pointwise import NormForm, plain_norm, plain_rotary, rms_norm, rotary
from surefoot.models.fast import FastPath, Undo, give_forwards
from surefoot.models.fast.gated import gated_path, without_liger
from surefoot.planning.fast_paths import FUSED
from surefoot.planning.plan import RunPlan

Normalize = Callable[[torch.Tensor, torch.Tensor, NormForm], torch.Tensor]
Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # as transformers' apply_rotary_pos_emb
_ROTARY = "apply_rotary_pos_emb"  # the function that transformers' attention layers call
_CLOSE = 1e-5  # relative difference between two fp32 computations of the same formula; other formulas differ far more
_VARIANTS = ((0.0, True), (1.0, False), (0.0, False))  # `shift` and `narrow_first` of NormForm
_EPS = ("variance_epsilon", "eps")


def fused_paths(plan: RunPlan) -> list[FastPath]:
    """Return the paths of fused operators in a plan: these two and "gated"."""
    found = [pointwise_path(plan.device.value)] if plan.kernels.pointwise.value == FUSED else []
    found += [rotary_path()] if plan.kernels.rotary.value == FUSED else []
    return found + ([gated_path()] if plan.kernels.gated.value == FUSED else [])


def pointwise_path(kind: str) -> FastPath:
    """Return the path for a device. kind: cpu | cuda."""
    if kind == "cuda":
        return FastPath("pointwise", partial(install, norm=liger.rms_norm, rotate=None), liger_obstacle, "liger")
    return FastPath("pointwise", install, obstacle, "blocks")


def rotary_path() -> FastPath:
    """Return the path of rotary embeddings on a GPU."""
    return FastPath("rotary", partial(install, norm=None, rotate=liger.rotary), _rotary_obstacle, "liger")


def install(model: nn.Module, norm: Normalize | None = rms_norm, rotate: Rotate | None = rotary) -> Undo:
    """Give every norm and attention layer with a supported formula the fast forward; return the undo function.

    norm: (x [..., N], weight [N], form) -> [..., N]; None leaves norms as they are.
    rotate: (q, k, cos, sin) -> q, k; None leaves attention layers as they are.
    """
    norms, rotations = _norms(model, norm) if norm else (), _rotary_layers(model, rotate) if rotate else ()
    return give_forwards([*norms, *rotations])


def obstacle(model: nn.Module) -> str:
    """Return why the path cannot be installed in this model; "" if it can."""
    found = next(_norms(model), None) or next(_rotary_layers(model), None)
    return "" if found else "none of its norms and attention layers has a supported formula"


def liger_obstacle(model: nn.Module) -> str:
    """The same for liger-kernel's norms."""
    return without_liger() or ("" if next(_norms(model), None) else "none of its norms has a supported formula")


def _rotary_obstacle(model: nn.Module) -> str:
    found = next(_rotary_layers(model), None)
    return without_liger() or ("" if found else "none of its attention layers rotates in the usual way")


class _Norm:
    """A norm with its fast forward, a bound method of this object, so that copying a model copies it too."""

    def __init__(self, module: nn.Module, form: NormForm, norm: Normalize):
        self.module = module
        self.form = form
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x, self.module.get_parameter("weight"), self.form)


class _RotaryLayer:
    """An attention layer whose own forward runs with another rotation function in its globals."""

    def __init__(self, module: nn.Module, plain: FunctionType, rotate: Rotate):
        self.module = module
        # A copy of the module's globals: in it the function is another for this layer alone, not for every model of the
        # family.
        names = {**plain.__globals__, _ROTARY: rotate}
        other = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
        other.__kwdefaults__ = plain.__kwdefaults__
        self.inner: Callable[..., Any] = other

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(self.module, *args, **kwargs)


def _norms(model: nn.Module, norm: Normalize = rms_norm) -> Iterator[_Norm]:
    for module in model.modules():
        if "forward" not in vars(module) and (form := norm_form(module)) is not None:
            yield _Norm(module, form, norm)


def _rotary_layers(model: nn.Module, rotate: Rotate = rotary) -> Iterator[_RotaryLayer]:
    for module in model.modules():
        plain = type(module).forward
        if "forward" in vars(module) or not isinstance(plain, FunctionType) or _ROTARY not in plain.__code__.co_names:
            continue
        function = plain.__globals__.get(_ROTARY)
        if function is not None and _is_usual_rotary(function):
            yield _RotaryLayer(module, plain, rotate)


@torch.no_grad()
def norm_form(module: nn.Module) -> NormForm | None:
    """Return this module's variant of RMSNorm, tested on a few rows; None if it is not an RMSNorm."""
    names = [name for name, _ in module.named_parameters()]
    eps = next((value for name in _EPS if isinstance(value := getattr(module, name, None), float)), None)
    if names != ["weight"] or eps is None or any(module.children()) or module._forward_hooks:
        return None
    weight = module.get_parameter("weight")
    if weight.ndim != 1 or not weight.is_floating_point() or isinstance(module, nn.LayerNorm):
        return None
    draws = torch.Generator().manual_seed(0)
    # A usual, a tiny and a large row: where eps is added shows in the tiny one alone.
    rows = torch.randn(3, len(weight), generator=draws) * torch.tensor([[1.0], [eps**0.5], [30.0]])
    rows = rows.to(weight.device)
    try:
        found = module.forward(rows)
        narrow = module.forward(rows.bfloat16())
    except (RuntimeError, TypeError, ValueError):
        return None
    if not (isinstance(found, torch.Tensor) and isinstance(narrow, torch.Tensor)):
        return None
    forms = [NormForm(eps, shift, narrow_first) for shift, narrow_first in _VARIANTS]
    fitting = [
        form
        for form in forms
        if narrow.dtype == form.output_type(torch.bfloat16, weight.dtype)
        and _close(found, plain_norm(rows, weight, form))
    ]

    def rounded_otherwise(form: NormForm) -> float:
        return float((plain_norm(rows.bfloat16(), weight, form) - narrow).float().norm())

    return min(fitting, key=rounded_otherwise, default=None)


@cache
@torch.no_grad()
def _is_usual_rotary(function: Any) -> bool:
    """Whether the function rotates the first half of every head with the second half."""
    draws = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, heads, 3, 8, generator=draws) for heads in (2, 1))
    cos, sin = (torch.randn(1, 3, 8, generator=draws) for _ in range(2))
    try:
        found = function(q, k, cos, sin)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    wanted = [plain_rotary(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]
    return (
        isinstance(found, tuple)
        and len(found) == len(wanted)
        and all(_close(one, other) for one, other in zip(found, wanted, strict=True))
    )


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare row by row, because rows may have very different magnitudes."""
    if one.shape != other.shape:
        return False
    differences = torch.linalg.vector_norm(one.float() - other.float(), dim=-1)
    return bool((differences <= _CLOSE * torch.linalg.vector_norm(other.float(), dim=-1)).all())
