"""A linear layer with an 8-bit weight, stored as in bitsandbytes' LLM.int8().

    W = codes * scale / 127,   scale = largest |W| of the row (Dettmers et al. 2022, the first half)

LLM.int8() also rounds activations to 8 bits, except for columns with outliers in some token of the micro-batch. Then a
token's result depends on the other tokens of its micro-batch. bitsandbytes does this on GPUs and, on a CPU, in
evaluation but not in training. Here activations are not rounded: the product is the same in training and evaluation, on
every device, for every split into micro-batches. It equals bitsandbytes' own training on a CPU. Importing this module
requires bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from surefoot.system.libraries import import_bitsandbytes

_library = import_bitsandbytes()
_LARGEST = 127  # code of a row's largest weight


class Int8Linear(_library.nn.Linear8bitLt):
    """A linear layer with a frozen 8-bit weight, compatible with PEFT's 8-bit adapters."""

    def __init__(self, linear: nn.Linear, device: torch.device):
        """Quantize the weight of `linear` onto `device`; the bias stays on its device."""
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, device="meta"
        )
        weight = _library.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        self.weight = weight.to(device)  # quantizes
        self.weight.CB = None  # an alias of the codes, which copying the layer would duplicate
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to x [..., in_features], in autocast's dtype if enabled, like torch's linear layers."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self.weight.data, self.weight.SCB, bias)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """x W^T + bias. Backward dequantizes again, because saving the dequantized weights of all layers needs too much
    memory."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        return nn.functional.linear(x, _dequantized(codes, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), (codes, scale) = gradients, ctx.saved_tensors
        return gradient @ _dequantized(codes, scale, gradient.dtype), None, None, None


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Scaled in the compute dtype, in place: a dense fp32 weight would be twice as large.
    return codes.to(dtype).mul_(scale.unsqueeze(1) * (1 / _LARGEST))
