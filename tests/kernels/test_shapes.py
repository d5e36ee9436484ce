"""A few rows more, so that products find their kernels: how many, where, and that they change no number."""

from __future__ import annotations

import pytest
import torch

from surefoot.kernels.operands import round_up_rows, round_up_tokens

CPU, BF16 = torch.device("cpu"), torch.bfloat16


@pytest.mark.parametrize(
    ("rows", "even"), [(1, 8), (8, 8), (9, 16), (250, 256), (513, 528), (1000, 1008), (2100, 2112), (4097, 4224)]
)
def test_rows_by_hand(rows, even):
    assert round_up_rows(rows, BF16, CPU) == even


def test_little_is_filled_and_few_numbers_are_left():
    found = {rows: round_up_rows(rows, BF16, CPU) for rows in range(1, 8193)}
    assert all(0 <= even - rows <= max(7, rows / 32) for rows, even in found.items())
    assert len({even for rows, even in found.items() if rows > 1024}) <= 3 * 32 + 1  # three powers of two


@pytest.mark.parametrize(("tokens", "even"), [(1, 32), (32, 32), (33, 64), (384, 384)])
def test_tokens_by_hand(tokens, even):
    assert round_up_tokens(tokens, BF16, CPU) == even


@pytest.mark.parametrize(("dtype", "device"), [(torch.float32, "cpu"), (torch.float64, "cpu"), (BF16, "cuda")])
def test_others_are_left_as_they_are(dtype, device):
    assert (
        round_up_rows(1001, dtype, torch.device(device)) == round_up_tokens(1001, dtype, torch.device(device)) == 1001
    )
