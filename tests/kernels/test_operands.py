"""Types that kernels compute in."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.operands import operand_type, wide_type

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_what_autocast_computes_in():
    with torch.autocast("cpu", BF16):
        assert operand_type(torch.float32, CPU) == BF16
        assert operand_type(torch.float64, CPU) == torch.float64
    assert operand_type(torch.float32, CPU) == torch.float32


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(BF16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2],
)
def test_sums_are_in_fp32_or_fp64(dtype, wide):
    assert wide_type(dtype) == wide
