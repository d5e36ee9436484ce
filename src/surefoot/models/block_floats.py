"""Linear layers that compute with weights and inputs in NVFP4 or MXFP4: numbers of 4 bits with a scale for each block.

For a block x of a row, with e2m1(.) the nearest of 0, 1/2, 1, 3/2, 2, 3, 4, 6 (and their negatives; halfway to the even
mantissa) and e4m3(.) the nearest 8-bit number with 4 exponent bits:

    nvfp4   16 numbers    t = max |tensor| / (6 * 448),  s = e4m3(max |x| / 6 / t),  x' = t s e2m1(x / (t s))
    mxfp4   32 numbers    s = 2^ceil(log2(max |x| / 6)),                             x' = s e2m1(x / s)

These are the numbers of torchao's NVFP4FakeQuantizedLinear and MXFakeQuantizedLinear (https://github.com/pytorch/ao),
to the bit; a test compares them. The product is one of rounded numbers in the run's dtype, as in torchao's emulation,
so it needs no GPU with 4-bit products. In the backward pass the gradient of rounding is 1 (straight-through), so each
of the two gradients is the product with the other's rounded numbers. The bias learns as usual (torchao's layers leave
it without a gradient).

The tensor of t is a layer's whole weight, and its input over all tokens of a micro-batch: other tokens beside it change
how a token is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from surefoot.planning.plan import QAT_BLOCKS

_LARGEST, _LARGEST_SCALE = 6.0, 448.0
_SMALLEST_SCALE = 2.0**-6  # the smallest normal e4m3
_ABOVE_ZERO = 2.0**-100
_EXPONENTS = 127.0  # of a scale with 8 exponent bits


def _e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number with 2 exponent bits and 1 mantissa bit. x: fp32, at most 6 in absolute value."""
    size = x.abs()
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / spacing) * spacing


def _nvfp4(x: torch.Tensor) -> torch.Tensor:
    # In a tensor of zeros torchao divides 0 by 0.
    whole = (x.abs().amax().float() / (_LARGEST_SCALE * _LARGEST)).clamp(min=_ABOVE_ZERO)
    blocks = x.float().unflatten(-1, (-1, QAT_BLOCKS["nvfp4"]))
    wanted = blocks.abs().amax(-1, keepdim=True) / _LARGEST / whole
    scale = wanted.clamp(_SMALLEST_SCALE, _LARGEST_SCALE).to(torch.float8_e4m3fn).float()
    rounded = _e2m1((blocks * ((1.0 / whole) / scale)).clamp(-_LARGEST, _LARGEST))
    return (rounded * (whole * scale)).flatten(-2).to(x.dtype)


def _mxfp4(x: torch.Tensor) -> torch.Tensor:
    blocks = x.float().unflatten(-1, (-1, QAT_BLOCKS["mxfp4"]))
    wanted = torch.log2(blocks.abs().amax(-1, keepdim=True) / _LARGEST)
    exponent = torch.ceil(wanted).clamp(-_EXPONENTS, _EXPONENTS)
    rounded = _e2m1((blocks * torch.exp2(-exponent)).clamp(-_LARGEST, _LARGEST))
    return (rounded * torch.exp2(exponent)).flatten(-2).to(x.dtype)


ROUND: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"nvfp4": _nvfp4, "mxfp4": _mxfp4}


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, form: str) -> torch.Tensor:
        return ROUND[form](x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class BlockFloatLinear(nn.Linear):
    """A linear layer over the same weight and bias as another, or over a weight that torchao stores in 4 bits.

    form: nvfp4 | mxfp4.
    enabled: whether it rounds.
    stored: whether the weight is in 4 bits.

    Shapes: input [..., inputs] -> [..., outputs], with `inputs` a multiple of the block.
    """

    def __init__(self, linear: nn.Linear, form: str) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.form, self.enabled, self.stored = form, True, is_stored(linear)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.enabled:
            input = _StraightThrough.apply(input, self.form)
            weight = weight.dequantize() if self.stored else _StraightThrough.apply(weight, self.form)
        return functional.linear(input, weight, self.bias)


def is_stored(linear: nn.Linear) -> bool:
    """Whether the layer's weight, which is not sharded, is one of torchao's tensors of few bits."""
    return type(linear.weight.data) is not torch.Tensor


def store(linear: BlockFloatLinear) -> None:
    """Put the weight into torchao's tensor of 4 bits, laid out as its converted layers have it, for a product with
    inputs that are rounded as they come."""
    from torchao.prototype.mx_formats import (  # pyright: ignore[reportMissingImports]  # an extra
        mx_tensor,
        nvfp4_tensor,
    )

    weight = linear.weight.detach()
    if linear.form == "nvfp4":
        inputs = nvfp4_tensor.QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True, use_dynamic_per_tensor_scale=True)
        scale = nvfp4_tensor.per_tensor_amax_to_scale(weight.abs().amax())
        stored = nvfp4_tensor.NVFP4Tensor.to_nvfp4(
            weight, per_tensor_scale=scale, is_swizzled_scales=True, act_quant_kwargs=inputs
        )
    else:
        config = stored_config("mxfp4")
        same = {"block_size": config.block_size, "kernel_preference": config.kernel_preference}
        same |= {"elem_dtype": config.weight_dtype, "scaling_mode": config.scaling_mode, "is_swizzled_scales": True}
        inputs = mx_tensor.QuantizeTensorToMXKwargs(**same)
        stored = mx_tensor.MXTensor.to_mx(weight, act_quant_kwargs=inputs, **same)
    linear.weight, linear.stored = nn.Parameter(stored, requires_grad=False), True


def stored_config(form: str) -> Any:
    """Return torchao's config for converted layers. form: nvfp4 | mxfp4."""
    from torchao.prototype import mx_formats  # pyright: ignore[reportMissingImports]

    if form == "nvfp4":
        return mx_formats.NVFP4DynamicActivationNVFP4WeightConfig(use_triton_kernel=False)
    number: Any = torch.float4_e2m1fn_x2
    return mx_formats.MXDynamicActivationMXWeightConfig(activation_dtype=number, weight_dtype=number)
