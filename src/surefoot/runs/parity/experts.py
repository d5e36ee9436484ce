"""Compare the kernel for adapters on experts with PEFT's own forward, in fp32, while weights are not sharded yet.

One module of each kind (class and shapes) is compared, alone and with its first few experts, so that billions of
weights take a few MiB. A and B get random numbers: a formula is right for all of them or for none.

Shapes: E experts, T tokens, k experts a token, H hidden size, r rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from surefoot.models.fast.experts import experts_path, install_wrapped, outermost
from surefoot.models.peft import ParamWrapper
from surefoot.models.precision import exact_products
from surefoot.runs.parity.differences import LIMITS
from surefoot.training.ranks import ALONE, Ranks, totals

_EXPERTS = 4  # of a module
_TOKENS = 8
_LIMIT = LIMITS["fp32"]


def experts_record(model: nn.Module, ranks: Ranks = ALONE, *, resumed: bool) -> dict[str, Any]:
    """Return the record of the path for environment.json. resumed: whether the run started with it, which keeps it.
    Collective: ranks use the path together or not at all."""
    if why := experts_path().obstacle(model):
        return {"used": False, "obstacle": why}
    kinds = {_kind(layer): layer for layer in reversed(outermost(model))}
    every = [0.0] * ranks.world
    every[ranks.rank] = max((_difference(layer) for layer in kinds.values()), default=0.0)
    differs = max(totals(every, ranks))
    outside = not differs <= _LIMIT
    return {"used": resumed or not outside, "outside": outside, "fp32": {"differs": differs, "limit": _LIMIT}}


def _kind(layer: ParamWrapper) -> tuple[Any, ...]:
    base = layer.get_base_layer()
    return type(base), *((name, one.shape) for name, one in layer.named_parameters())


def _difference(layer: ParamWrapper) -> float:
    """Return the largest relative difference of the output and of the gradients of A and B."""
    draws = torch.Generator().manual_seed(0)
    with exact_products(), _few_experts(layer, draws) as count:
        given = [one.to(layer.get_param().device) for one in _inputs(layer, count, draws)]
        plain = _outcome(layer, given)
        undo = install_wrapped(layer)
        try:
            other = _outcome(layer, given)
        finally:
            undo()
    found = [float((b - a).norm() / a.norm()) for a, b in zip(plain, other, strict=True)]
    return max(found) if all(map(math.isfinite, found)) else sys.float_info.max


def _outcome(layer: ParamWrapper, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    learning = [one for one in layer.parameters() if one.requires_grad]
    out = layer(*given)
    found = torch.autograd.grad(out.sin().sum(), learning, allow_unused=True)
    return [out.detach(), *(one for one in found if one is not None)]


def _inputs(layer: ParamWrapper, count: int, draws: torch.Generator) -> list[torch.Tensor]:
    """Return hidden states [T, H] and, for experts, which are chosen, [T, k], and their weights, [T, k]."""
    hidden: Any = layer.out_features if layer.parameter_name == "down_proj" else layer.in_features
    x = torch.randn(_TOKENS, hidden, generator=draws)
    if isinstance(layer.get_base_layer(), nn.Linear):
        return [x]
    chosen = min(2, count)
    index = torch.stack([torch.randperm(count, generator=draws)[:chosen] for _ in range(_TOKENS)])
    return [x, index, torch.rand(_TOKENS, chosen, generator=draws)]


@contextmanager
def _few_experts(layer: ParamWrapper, draws: torch.Generator) -> Iterator[int]:
    """Context in which the layer has its first few experts alone, in fp32, and random numbers in A and B; the layer is
    restored afterwards. Yields their number."""
    base, wrappers = layer.get_base_layer(), [one for one in layer.modules() if isinstance(one, ParamWrapper)]
    every, count = layer.num_experts, min(layer.num_experts, _EXPERTS)
    data = [(one, one.data) for one in layer.parameters()]
    counted: list[Any] = [one for one in (*wrappers, base) if hasattr(one, "num_experts")]
    try:
        for one in counted:
            one.num_experts = count
        for one in base.parameters():
            one.data = (one.data[:count] if every > 1 else one.data).float()
        for wrapper in wrappers:
            for one in wrapper.lora_A.parameters():  # [E r, inputs]
                one.data = _random((len(one) * count // every, one.shape[1]), draws, one.device)
            for one in wrapper.lora_B.parameters():  # [outputs, r E]
                one.data = _random((len(one), one.shape[1] * count // every), draws, one.device)
        yield count
    finally:
        for one in counted:
            one.num_experts = every
        for one, own in data:
            one.data = own


def _random(shape: tuple[int, int], draws: torch.Generator, device: torch.device) -> torch.Tensor:
    return (torch.randn(shape, generator=draws) / shape[1] ** 0.5).to(device)
