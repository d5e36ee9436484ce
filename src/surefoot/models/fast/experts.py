"""LoRA on the experts of a mixture, computed with `surefoot.kernels.experts`.

Like `surefoot.models.fast.adapters` for linear layers: parameters, names and files remain PEFT's. The outermost PEFT
layer around a module of experts gets another `forward`, which falls back to PEFT's own in unsupported cases.

`experts_path` is for engines that shard weights, where linear layers keep PEFT's arithmetic: nothing here is kept from
one forward pass to the next, so weights are needed only while their layer runs. It also takes linear layers that PEFT
adapts as parameters (`surefoot.models.adapter_targets`), such as shared experts: y = W x + s B A x in place of
(W + s B A) x, which 16 bits would round.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.kernels.experts import Matrices, adapted_experts
from surefoot.models.facts import is_router
from surefoot.models.fast import FastPath, Undo, give_forwards
from surefoot.models.peft import ParamWrapper
from surefoot.planning.fast_paths import EXPERTS

# Attributes that transformers' `use_experts_implementation` sets on a module of experts, which describe its layout.
_LAYOUT = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")


_Pairs = dict[str, tuple[torch.Tensor, torch.Tensor, float]]  # parameter -> (A, B, scale)


def experts_path() -> FastPath:
    return FastPath("adapter", install_wrapped, _obstacle, EXPERTS)


def _obstacle(model: nn.Module) -> str:
    unknown = [type(one.get_base_layer()).__name__ for one in outermost(model) if not _forward_of(one)]
    return f"PEFT adapts parameters of {unknown[0]}, whose layout is not known" if unknown else ""


def install(model: nn.Module) -> Undo:
    """Give every adapted module of experts the fast forward. Parameters must not be sharded when it runs."""
    return give_forwards([_Experts(one) for one in outermost(model) if _are_known(one.get_base_layer())])


def install_wrapped(model: nn.Module) -> Undo:
    """The same, and linear layers that PEFT adapts as parameters."""
    return give_forwards([make(one) for one in outermost(model) if (make := _forward_of(one))])


def outermost(model: nn.Module) -> list[ParamWrapper]:
    """Return PEFT's layers around modules with adapted parameters, one for each module; routers are left out."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(one.base_layer) for one in wrappers}
    return [one for one in wrappers if id(one) not in inner and not is_router(one.get_base_layer())]


def _forward_of(layer: ParamWrapper) -> type[_Slot] | None:
    base = layer.get_base_layer()
    return _Experts if _are_known(base) else _Linear if type(base) is nn.Linear else None


def _are_known(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _LAYOUT) and not getattr(module, "has_post_expert_norm", True)


class _Slot:
    """A layer with its fast forward, a bound method of this object, so that copying a model copies it too."""

    def __init__(self, module: ParamWrapper):
        self.module = module
        self.plain = module.forward

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError

    def pairs(self) -> _Pairs | None:
        """Return the active adapter; None if PEFT's own forward must run."""
        found: _Pairs = {}
        layer: Any = self.module
        while isinstance(layer, ParamWrapper):
            names = [name for name in layer.active_adapters if name in layer.lora_A]
            if layer.disable_adapters or layer.merged or len(names) != 1 or layer.get_param().requires_grad:
                return None
            (name,) = names
            a, b = layer.lora_A[name], layer.lora_B[name]
            if b.bias is not None:
                return None
            found[layer.parameter_name] = a.get_parameter("weight"), b.get_parameter("weight"), layer.scaling[name]
            layer = layer.base_layer
        return found


class _Linear(_Slot):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        pairs, base = self.pairs(), self.module.get_base_layer()
        one_type = x.dtype == base.get_parameter("weight").dtype == torch.float32
        if not pairs or args or kwargs or not (one_type or torch.is_autocast_enabled(x.device.type)):
            return self.plain(x, *args, **kwargs)
        a, b, scale = pairs["weight"]
        return torch.add(base(x), F.linear(F.linear(x, a), b), alpha=scale)


class _Experts(_Slot):
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        experts: Any = self.module.get_base_layer()
        pairs = self.pairs()
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        if pairs is None or not pairs.keys() <= {first, "down_proj"} or experts._is_expert_parallel:
            return self.plain(x, *args, **kwargs)
        if kwargs or len(args) != 2:
            return self.plain(x, *args, **kwargs)
        index, share = args
        activate = experts._apply_gate if experts.has_gate else experts.act_fn
        up, down = (_matrices(experts, name, pairs.get(name)) for name in (first, "down_proj"))
        return adapted_experts(x, index, share, up, down, activate)


def _matrices(experts: Any, name: str, pair: tuple[torch.Tensor, torch.Tensor, float] | None) -> Matrices:
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    a, b, scale = pair or (None, None, 1.0)
    return Matrices(getattr(experts, name), bias, a, b, scale, turned=not experts.is_transposed)
