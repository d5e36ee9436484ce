"""Apply a precision plan: autocast for matrix products, TF32, and quantization of the base for QLoRA.

NF4 (Dettmers et al. 2023, by bitsandbytes) stores a weight in 4 bits: one of 16 values spaced for a normal
distribution, times the largest value of its block of 64; these scales are stored in 8 bits with one scale per 256 of
them (double quantization). Every product dequantizes its weight to the compute dtype: a quarter of a 16-bit base's
memory, for more time per step. int8 (`surefoot.models.int8`) has one byte per weight and one scale per row.
Quantization is deterministic on every load, so the quantized base is not saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from surefoot.models.decoder import decoder_layers
from surefoot.models.peft import dequantize_module_weight
from surefoot.planning.plan import DType, PackedType, PrecisionPlan
from surefoot.system.libraries import import_bitsandbytes

TORCH_DTYPE: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CODES: dict[PackedType, torch.dtype] = {"nf4": torch.uint8, "int8": torch.int8}
"""Quantized type -> dtype of its storage."""


def autocast(plan: PrecisionPlan, device: torch.device, *, cached: bool = True) -> AbstractContextManager[object]:
    """Return a context for one forward pass in which matrix products run in the compute dtype; null for fp32.

    Autocast's cache of cast weights ends with the context, so weights updated by the optimizer are cast again.

    cached: False where nothing else keeps the casts and they should be freed after their product.
    """
    if plan.compute.value == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=TORCH_DTYPE[plan.compute.value], cache_enabled=cached)


def set_tf32(plan: PrecisionPlan) -> None:
    """Allow or forbid TF32 in fp32 matrix products on NVIDIA GPUs, for this process; elsewhere it has no effect."""
    precision = "tf32" if plan.tf32.value else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.fp32_precision = precision


def hold_in_fp32(model: nn.Module) -> None:
    """Convert trainable parameters to fp32: in half precision small optimizer updates would be rounded away."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            # In place of its data, so that references to the parameter (ties, an engine's groups) stay valid.
            parameter.data = parameter.data.float()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite; always true for integer types."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    # aminmax propagates NaN: one pass, without a boolean tensor of the same size.
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


@contextmanager
def widened(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Context in which these tensors are converted to fp32; afterwards their original memory is restored."""
    before = [one.data for one in tensors]
    try:
        for one in tensors:
            one.data = one.data.float()
        yield
    finally:
        for one, own in zip(tensors, before, strict=True):
            one.data = own


@contextmanager
def exact_products() -> Iterator[None]:
    """Context in which fp32 matrix products do not use TF32."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.fp32_precision for one in backends]
    try:
        for one in backends:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, own in zip(backends, before, strict=True):
            one.fp32_precision = own


def quantize(model: PreTrainedModel, to: PackedType, *, compute: torch.dtype, device: torch.device) -> None:
    """Quantize every linear layer inside the decoder layers, in place, and put the whole model on `device`.

    Embeddings, norms and the output head are not quantized. Works layer by layer, so that the device never holds the
    unquantized model.

    compute: dtype of matrix products.
    """
    from surefoot.models.int8 import Int8Linear  # needs bitsandbytes

    layers = decoder_layers(model)
    for name, module in list(layers.named_modules()):
        if type(module) is nn.Linear:
            packed = Int8Linear(module, device) if to == "int8" else _nf4(module, compute, device)
            layers.set_submodule(name, packed)
    model.to(device)  # pyright: ignore[reportArgumentType]  # a decorator of transformers hides the signature
    # PEFT reads this flag to use its 4-bit or 8-bit adapter layers.
    setattr(model, "is_loaded_in_8bit" if to == "int8" else "is_loaded_in_4bit", True)


def is_quantized(module: nn.Module) -> bool:
    """Whether the module is a linear layer with packed storage. Works without bitsandbytes."""
    return isinstance(module, nn.Linear) and module.weight.dtype in CODES.values()


def plain_weight(layer: nn.Module) -> torch.Tensor:
    """Return the weight [out_features, in_features] of a linear layer, dequantized if needed: NF4 to the original
    dtype, int8 to fp32."""
    return dequantize_module_weight(layer) if is_quantized(layer) else layer.get_parameter("weight")


def _nf4(linear: nn.Linear, compute: torch.dtype, device: torch.device) -> nn.Linear:
    library = import_bitsandbytes()
    packed = library.nn.Linear4bit(
        linear.in_features,
        linear.out_features,
        bias=linear.bias is not None,
        compute_dtype=compute,
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    weight = library.nn.Params4bit(
        linear.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4", module=packed
    )
    packed.weight = weight.to(device)  # quantizes
    packed.bias = linear.bias
    # Otherwise, in eval mode on a CPU with AVX512-BF16, it permanently repacks its weights in a form without gradients,
    # and training after an evaluation would learn nothing.
    packed.support_avx512bf16_for_cpu = False
    return packed.train(linear.training)
