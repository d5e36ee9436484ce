"""A linear layer whose weight is held in 8 bits, as LLM.int8() holds it in bitsandbytes.

    W = codes * scale / 127,   scale = largest |W| of the row (Dettmers et al. 2022, the first half)

LLM.int8() also rounds the activations to 8 bits, but for the columns in which some token of the micro-batch is an
outlier. Then a token's numbers depend on which tokens it shares a micro-batch with, and bitsandbytes does so on a GPU
and, on a CPU, in evaluation but not in training. Here activations stay whole: the same product in training and
evaluation, on every device, for every split into micro-batches. It is what bitsandbytes itself trains with on a CPU.
Import needs bitsandbytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from surefoot.system.libraries import import_bitsandbytes

_library = import_bitsandbytes()
_LARGEST = 127  # code of a row's largest weight


class Int8Linear(_library.nn.Linear8bitLt):
    """What PEFT's 8-bit adapters go onto; the weight is frozen."""

    def __init__(self, linear: nn.Linear, device: torch.device):
        """Quantises the weight of `linear`; the codes lie on `device`, a bias stays where it is."""
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False, device="meta"
        )
        weight = _library.nn.Int8Params(linear.weight.data, requires_grad=False, has_fp16_weights=False)
        self.weight = weight.to(device)  # quantises
        self.weight.CB = None  # the same codes by another name: a copy of the layer would copy them twice
        self.bias = linear.bias
        self.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]. Under autocast in its type, as torch's linear layers."""
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _Product.apply(x, self.weight.data, self.weight.SCB, bias)  # pyright: ignore[reportReturnType]


class _Product(torch.autograd.Function):
    """x W^T + bias. The backward pass dequantises anew: kept, the weights of all layers would be there at once."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        return nn.functional.linear(x, _dequantised(codes, scale, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (gradient,), (codes, scale) = gradients, ctx.saved_tensors
        return gradient @ _dequantised(codes, scale, gradient.dtype), None, None, None


def _dequantised(codes: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return codes.to(dtype).mul_(scale.unsqueeze(1) * (1 / _LARGEST))
