"""Types that kernels compute in, and how many rows more products get so that they find their kernels."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.operands import operand_type, round_up_rows, round_up_tokens, wide_type

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def test_what_autocast_computes_in():
    with torch.autocast("cpu", BF16):
        assert operand_type(torch.float32, CPU) == BF16
        assert operand_type(torch.float64, CPU) == torch.float64
    assert operand_type(torch.float32, CPU) == torch.float32


def test_sums_are_in_fp32_or_fp64():
    for dtype in (BF16, torch.float16, torch.float32):
        assert wide_type(dtype) == torch.float32
    assert wide_type(torch.float64) == torch.float64


def test_rows_and_tokens_by_hand():
    rows = {1: 8, 8: 8, 9: 16, 250: 256, 513: 528, 1000: 1008, 2100: 2112, 4097: 4224}
    assert {given: round_up_rows(given, BF16, CPU) for given in rows} == rows
    tokens = {1: 32, 32: 32, 33: 64, 384: 384}
    assert {given: round_up_tokens(given, BF16, CPU) for given in tokens} == tokens


def test_little_is_filled_and_few_numbers_are_left():
    found = {rows: round_up_rows(rows, BF16, CPU) for rows in range(1, 8193)}
    assert all(0 <= even - rows <= max(7, rows / 32) for rows, even in found.items())
    assert len({even for rows, even in found.items() if rows > 1024}) <= 3 * 32 + 1  # three powers of two


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (torch.float64, "cpu"), (BF16, "cuda")])
def test_others_are_left_as_they_are(dtype, device):
    for rounded in (round_up_rows, round_up_tokens):
        assert rounded(1001, dtype, torch.device(device)) == 1001
