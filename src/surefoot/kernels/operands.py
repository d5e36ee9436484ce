"""Operands of a matrix product: the type they are computed in, and how many rows they get so that a kernel is cached.

On a CPU oneDNN makes a kernel for each new shape of 16-bit operands and keeps the last ones: 1,024, of which surefoot
leaves it 256. That takes 5 to 10 ms of a core for a product as wide as a 125 M model's, and about a millisecond for a
narrow one. The tokens of a packed row, the rows that a head reads and the tokens of a document are other numbers in
each step: a tenth of what the products of a LoRA step took went into making kernels that were never used again.
Rounding the number of rows up leaves few shapes. Products of fp32 (MKL) and of GPUs have no such cost and are left.
"""

from __future__ import annotations

import torch

_FEWEST = 8
_SHARE = 32  # at most a 32nd of the rows is added
_TOKENS = 32


def operand_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that a product computes an operand in, under the current autocast, which leaves fp64 as it is.

    dtype: of the operand.
    device: that the product runs on.
    """
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """The type for sums and exponents: fp32, and fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def round_up_rows(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """`rows` rounded up by at most a 32nd (or 7), on a CPU in 16 bits; elsewhere `rows`.

    rows: of the product's left operand.
    dtype: of its operands.
    """
    return _up(rows, max(_FEWEST, 1 << (max(rows // _SHARE, 1).bit_length() - 1))) if _counts(dtype, device) else rows


def round_up_tokens(tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """The next multiple of 32, for one document of at most some hundred tokens; see `round_up_rows`."""
    return _up(tokens, _TOKENS) if _counts(dtype, device) else tokens


def _counts(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype.itemsize == 2


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
