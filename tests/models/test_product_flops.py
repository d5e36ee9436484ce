"""Arithmetic by type and module, against counts by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from surefoot.kernels.packed_attention import documents_of, matmul
from surefoot.models.product_flops import ProductFlops

ROWS, WIDTH = 8, 64
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # FLOPs


class InFp32(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), InFp32(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(self.first(x))


def counted(model, *, backward):
    x = torch.randn(ROWS, WIDTH)
    with ProductFlops() as seen:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        if backward:
            out.float().sum().backward()
    return seen


def test_forward():
    seen = counted(Outer(), backward=False)
    assert seen.share("fp32") == 0.5
    assert seen.modules("fp32") == [("second", 0.5)]
    assert seen.modules("bf16") == [("first", 0.5)]


def test_backward_counts_too():
    """Weight gradients of both, and the input gradient of the second: the first's input wants none."""
    seen = counted(Outer(), backward=True)
    assert seen.share("fp32") == 3 / 5
    assert seen.share("bf16") == 2 / 5
    assert seen.share("fp16") == 0


def test_without_products_every_share_is_none():
    with ProductFlops() as seen:
        torch.ones(3).sum()
    assert seen.share("fp32") == 0
    assert seen.modules("fp32") == []


def test_products_that_are_added_in_place_count_too():
    x, y = torch.randn(ROWS, WIDTH), torch.randn(WIDTH, WIDTH)
    with ProductFlops() as seen:
        torch.zeros(ROWS, WIDTH).addmm_(x, y)
        torch.zeros(2, ROWS, WIDTH).baddbmm_(x.expand(2, -1, -1), y.expand(2, -1, -1))
    assert seen.total == 3 * PRODUCT


def test_flash_attention_of_a_cpu_counts_two_products_forward_and_five_backward():
    q, k, v = (torch.randn(1, 2, 16, WIDTH, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 16 * 16 * WIDTH
    with ProductFlops() as seen, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert seen.total == 2 * product
        out.sum().backward()
    assert seen.total == 7 * product


@pytest.mark.parametrize(("dtype", "fp32"), [(torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.float32, 1.0)])
def test_logits_that_are_wider_on_purpose_are_of_no_type(dtype, fp32):
    """Two products forward; five backward, of which the logits are one; the twin around it is in fp32 and is seen."""
    q, k, v = (torch.randn(1, 2, 32, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3))
    product = 2 * 2 * 32 * 32 * WIDTH
    with ProductFlops() as seen:
        matmul(q, k, v, documents_of([32], q.device), 1.0).sum().backward()
    assert seen.total == 7 * product
    assert seen.share("fp32") == fp32
    with ProductFlops() as twin:
        matmul(q, k, v, documents_of([32], q.device), 1.0).sum().backward()
        torch.bmm(q[0].float(), k[0].float().transpose(1, 2))
    assert twin.share("fp32") == (1.0 if dtype == torch.float32 else 1 / 8)
