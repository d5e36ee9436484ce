"""In which type a kernel computes.

How many rows to give a product, so that its kernel is at hand.

On a CPU oneDNN makes a kernel for each new shape of 16-bit operands and keeps the last ones: 1,024, of which surefoot
leaves it 256. That takes 5 to 10 ms of a core for a product as wide as a 125 M model's, and about a millisecond for a
narrow one. The tokens of a packed row, the rows that a head reads and the tokens of a document are other numbers in
each step: a tenth of what the products of a LoRA step took went into making kernels that were never asked for again.
A few rows of filling leave few shapes.

Products of fp32 (MKL) and of GPUs have no such cost, and get no filling.
"""

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


_FEWEST = 8
_SHARE = 32  # one part in so many at most is filling
_TOKENS = 32


def even_rows(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """At least `rows`, and at most a 32nd (or 7) more. dtype: of the product's operands."""
    return _up(rows, max(_FEWEST, 1 << (max(rows // _SHARE, 1).bit_length() - 1))) if _counts(dtype, device) else rows


def even_tokens(tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Of one document of some hundred tokens at most: the next multiple of 32."""
    return _up(tokens, _TOKENS) if _counts(dtype, device) else tokens


def _counts(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype.itemsize == 2


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
