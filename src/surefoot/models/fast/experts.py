"""LoRA on the experts of a mixture, computed with `surefoot.kernels.experts`.

Like `surefoot.models.fast.adapters` for linear layers: parameters, names and files remain PEFT's. The outermost PEFT
layer around a module of experts gets another `forward`, which falls back to PEFT's own in unsupported cases.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from surefoot.kernels.experts import Matrices, adapted_experts
from surefoot.models.fast import Undo
from surefoot.models.peft import ParamWrapper

# Attributes that transformers' `use_experts_implementation` sets on a module of experts, which describe its layout.
_LAYOUT = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")


def install(model: nn.Module) -> Undo:
    """Give every adapted module of experts the fast forward. Parameters must not be sharded when it runs."""
    wrappers = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    inner = {id(one.base_layer) for one in wrappers}
    slots = [_Slot(one) for one in wrappers if id(one) not in inner and _are_known(one.get_base_layer())]
    for slot in slots:
        slot.layer.forward = slot.forward

    def undo() -> None:
        for slot in slots:
            del slot.layer.forward

    return undo


def _are_known(module: nn.Module) -> bool:
    return all(hasattr(module, name) for name in _LAYOUT) and not getattr(module, "has_post_expert_norm", True)


class _Slot:
    """Experts with their fast forward, a bound method of this object, so that copying a model copies it too."""

    def __init__(self, layer: ParamWrapper):
        self.layer = layer
        self.plain = layer.forward

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        pairs = self._pairs()
        if pairs is None or kwargs or len(args) != 2:
            return self.plain(x, *args, **kwargs)
        experts: Any = self.layer.get_base_layer()
        index, share = args
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        activate = experts._apply_gate if experts.has_gate else experts.act_fn
        up, down = (_matrices(experts, name, pairs.get(name)) for name in (first, "down_proj"))
        return adapted_experts(x, index, share, up, down, activate)

    def _pairs(self) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]] | None:
        """Return parameter -> (A, B, scale); None if PEFT's own forward must run."""
        found: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        layer: Any = self.layer
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
        experts = layer
        known = {"gate_up_proj" if experts.has_gate else "up_proj", "down_proj"}
        return found if found.keys() <= known and not experts._is_expert_parallel else None


def _matrices(experts: Any, name: str, pair: tuple[torch.Tensor, torch.Tensor, float] | None) -> Matrices:
    weight = getattr(experts, name)
    weight = weight if experts.is_transposed else weight.transpose(1, 2)
    bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
    return Matrices(weight, bias) if pair is None else Matrices(weight, bias, *pair)
