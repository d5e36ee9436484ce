"""Operands of matrix products: their dtype, and their number of rows, rounded up so that cached kernels are reused.

On a CPU oneDNN compiles a kernel for each new shape of 16-bit operands and caches the last ones (1,024 by default;
surefoot sets 256). Compiling takes 5 to 10 ms of CPU time for a product as wide as a 125 M model's, and about 1 ms for
a narrow one. The numbers of tokens in a packed row, of rows read by the head and of tokens in a document differ in each
step, so a tenth of the time of a LoRA step's products went into kernels that were never reused. Rounding up the number
of rows leaves few shapes. Products in fp32 (MKL) and on GPUs have no such cost and are not rounded.
"""

from __future__ import annotations

import torch

_FEWEST = 8
_SHARE = 32  # at most 1/32 of the rows is added
_TOKENS = 32


def operand_type(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a matrix product computes an operand under the current autocast (which skips fp64).

    dtype: the operand's dtype.
    device: device of the product.
    """
    if torch.is_autocast_enabled(device.type) and dtype != torch.float64:
        return torch.get_autocast_dtype(device.type)
    return dtype


def wide_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for sums and exponentials: fp64 for fp64, else fp32."""
    return torch.promote_types(dtype, torch.float32)


def round_up_rows(rows: int, dtype: torch.dtype, device: torch.device) -> int:
    """Round `rows` up by at most 1/32 (or 7) for 16-bit products on a CPU; otherwise return `rows`.

    rows: rows of the left operand.
    dtype: dtype of the operands.
    """
    # A power of two as the step: so sizes of all magnitudes share few shapes, with the same largest waste.
    return _up(rows, max(_FEWEST, 1 << (max(rows // _SHARE, 1).bit_length() - 1))) if _counts(dtype, device) else rows


def round_up_tokens(tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """Round the tokens of one document (up to some hundred) up to a multiple of 32; see `round_up_rows`."""
    return _up(tokens, _TOKENS) if _counts(dtype, device) else tokens


def _counts(dtype: torch.dtype, device: torch.device) -> bool:
    return device.type == "cpu" and dtype.itemsize == 2


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
