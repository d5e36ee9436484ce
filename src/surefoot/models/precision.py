"""Carry out a precision plan: autocast for the matrix products, TF32 for the rest, few bits for the base of QLoRA.

NF4 (Dettmers et al. 2023, by bitsandbytes) holds a weight in 4 bits, one of 16 values whose spacing suits a normal
distribution, times the largest value of its block of 64; these scales are held in 8 bits with a scale per 256 of them
(double quantisation). Every product dequantises its weight again, to the compute dtype: a quarter of a 16-bit base's
memory, for more time per step. int8 (`surefoot.models.int8`) has a byte per weight and a scale per row. The same
weights give the same bits on every load, so nothing of the base is saved.
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
"""What a packed weight is stored as."""


def autocast(plan: PrecisionPlan, device: torch.device) -> AbstractContextManager[object]:
    """A fresh context for one forward pass, in which matrix products run in the compute dtype. Nothing for fp32.

    The cache of cast weights ends with the context, so a weight that an optimizer step changed is cast anew.
    """
    if plan.compute.value == "fp32":
        return nullcontext()
    return torch.autocast(device.type, dtype=TORCH_DTYPE[plan.compute.value])


def set_tf32(plan: PrecisionPlan) -> None:
    """Allow or forbid TF32 in fp32 matrix products on NVIDIA GPUs, for this process; elsewhere it has no effect."""
    precision = "tf32" if plan.tf32.value else "ieee"
    torch.backends.cuda.matmul.fp32_precision = precision
    torch.backends.cudnn.fp32_precision = precision


def hold_in_fp32(model: nn.Module) -> None:
    """What trains, whatever the rest is held in: an optimizer's small steps would be rounded away in half precision."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are; of a type without NaN, always."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    # NaN survives min and max: one pass, without a second tensor of booleans as large as the first.
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


@contextmanager
def widened(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, these hold the same numbers in fp32; afterwards what they held before, to the very memory."""
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
    """Inside, fp32 matrix products are in fp32, whatever TF32 is allowed otherwise."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [one.fp32_precision for one in backends]
    try:
        for one in backends:
            one.fp32_precision = "ieee"
        yield
    finally:
        for one, own in zip(backends, before, strict=True):
            one.fp32_precision = own


def quantise(model: PreTrainedModel, to: PackedType, *, compute: torch.dtype, device: torch.device) -> None:
    """Quantise every linear layer inside the decoder layers, in place, and put the whole model on `device`.

    Embeddings, norms and the output head stay as they are. compute: dtype of the products. Quantised layer by layer,
    so that the device never holds the unpacked model.
    """
    from surefoot.models.int8 import Int8Linear  # needs bitsandbytes

    layers = decoder_layers(model)
    for name, module in list(layers.named_modules()):
        if type(module) is nn.Linear:
            packed = Int8Linear(module, device) if to == "int8" else _nf4(module, compute, device)
            layers.set_submodule(name, packed)
    model.to(device)  # pyright: ignore[reportArgumentType]  # a decorator of transformers hides the signature
    # How PEFT tells that these layers take its 4-bit or 8-bit adapters.
    setattr(model, "is_loaded_in_8bit" if to == "int8" else "is_loaded_in_4bit", True)


def is_quantised(module: nn.Module) -> bool:
    """By the storage: a linear layer whose weight is packed bytes. Works where bitsandbytes is not installed."""
    return isinstance(module, nn.Linear) and module.weight.dtype in CODES.values()


def plain_weight(layer: nn.Module) -> torch.Tensor:
    """[out_features, in_features] of a linear layer; a packed weight is dequantised: NF4 to the dtype that it
    came from, int8 to fp32."""
    return dequantize_module_weight(layer) if is_quantised(layer) else layer.get_parameter("weight")


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
    packed.weight = weight.to(device)  # quantises
    packed.bias = linear.bias
    # In evaluation on a CPU with AVX512-BF16 it would repack its weights for good, in a form that has no gradient:
    # the first training step after an evaluation would learn nothing.
    packed.support_avx512bf16_for_cpu = False
    return packed.train(linear.training)
