"""DoRA's row norms computed once for many forward passes whose weights stay the same.

    y = (m / |W + s B A| - 1) * W x + m / |W + s B A| * s B A x     (W x without its bias)

PEFT forms B A and the norm in every forward pass. In decoding that is most of the work: a whole matrix for one token.
Its own cache keeps B A as well, which takes as much memory as the model; only the norms are kept here, and the
arithmetic is PEFT's, to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from surefoot.models.peft import DoraLinearLayer, dequantize_module_weight


class HeldNorms:
    """For one stretch in which no weight of `model` changes and nothing trains. A norm is computed when its layer runs
    first, where sharded weights are gathered."""

    def __init__(self, model: nn.Module):
        self._layers = [module for module in model.modules() if type(module) is DoraLinearLayer]
        self._scales: dict[DoraLinearLayer, torch.Tensor] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, forward passes of the model use the norms; outside, nothing is left in it."""
        for layer in self._layers:
            layer.forward = self._forward(layer)
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward

    def _forward(self, layer: DoraLinearLayer) -> Any:
        def forward(
            x: torch.Tensor,
            *,
            lora_A: nn.Module,
            lora_B: nn.Module,
            scaling: float,
            base_layer: nn.Module,
            base_result: torch.Tensor,
            adapter_name: str = "default",
        ) -> torch.Tensor:
            if layer not in self._scales:
                self._scales[layer] = _scale(layer, x.dtype, lora_A, lora_B, scaling, base_layer)
            scale = self._scales[layer]
            bias = getattr(base_layer, "bias", None)
            plain = base_result if bias is None else base_result - bias
            return (scale - 1) * plain + scale * lora_B(lora_A(x)) * scaling

        return forward


def _scale(
    layer: DoraLinearLayer, dtype: torch.dtype, lora_A: nn.Module, lora_B: nn.Module, scaling: float, base: nn.Module
) -> torch.Tensor:
    """m / |W + s B A|, [1, outputs], as PEFT's forward computes it."""
    change = layer.get_lora_weight(lora_A=lora_A, lora_B=lora_B).to(dtype)
    norm = layer.get_weight_norm(weight=dequantize_module_weight(base).to(dtype), lora_weight=change, scaling=scaling)
    return (layer.get_parameter("weight") / norm).view(1, -1)
