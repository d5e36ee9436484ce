"""Carry out a precision plan: autocast for the matrix products, TF32 for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from surefoot.planning.plan import DType, PrecisionPlan

TORCH_DTYPE: dict[DType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


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
