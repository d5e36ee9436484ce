"""Autocast and TF32 as planned."""

from __future__ import annotations

import pytest
import torch

from helpers.plans import precision_plan
from surefoot.models.precision import TORCH_DTYPE, autocast, set_tf32


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_matrix_products_run_in_the_compute_dtype(compute):
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with autocast(precision_plan(compute), torch.device("cpu")):
        assert layer(x).dtype == TORCH_DTYPE[compute]
    assert layer(x).dtype == torch.float32


@pytest.mark.parametrize(("allowed", "name"), [(True, "tf32"), (False, "ieee")])
def test_tf32_is_set_both_ways(allowed, name):
    before = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.fp32_precision
    try:
        set_tf32(precision_plan(tf32=allowed))
        assert torch.backends.cuda.matmul.fp32_precision == name
        assert torch.backends.cudnn.fp32_precision == name
    finally:
        torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.fp32_precision = before
