"""In which type a kernel computes."""

from __future__ import annotations

import torch


def operand_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What a product's operand of this type is computed in here: autocast leaves fp64 as it is."""
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """For sums and exponents: fp32, and fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
