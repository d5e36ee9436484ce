"""DoRA's passes over outputs on a GPU: Triton's kernels beside torch's operators. Without a GPU they run in Triton's
interpreter, where Triton is installed (`TRITON_INTERPRET=1`, set before anything imports it)."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from helpers import pretend_gpu
from surefoot.kernels import adapters, dora
from surefoot.kernels.adapters import Layers, Projection, adapted
from surefoot.kernels.dora import Factor, factored_norms, factors_of, row_squares

dora_gpu = pytest.importorskip("surefoot.kernels.dora_gpu", reason="needs Triton")
REAL = torch.cuda.is_available() and not pretend_gpu.is_here()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if REAL else "cpu"
LAST = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # of a number's last place, relative
TYPES = list(LAST) if REAL else [torch.float16]  # Triton's interpreter cuts off what bf16 should round
TYPICAL = 1e-3  # relative error of sums of fp16 products, rounded in another order
FEW = 1e-4  # share of numbers that fp32, rounded in another order, rounds to the other neighbor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (REAL or INTERPRETED), reason="needs a GPU, or Triton and its interpreter"),
]


def numbers(tokens: int, width: int, dtype: torch.dtype, change: float) -> tuple[torch.Tensor, torch.Tensor, Factor]:
    """dy, z [T, O], and a factor whose f is 1 up to about `change`."""
    draws = torch.Generator().manual_seed(tokens + width)
    dy, z = (torch.randn(tokens, width, generator=draws).to(DEVICE, dtype) for _ in range(2))
    norm = 1 + torch.rand(width, generator=draws).to(DEVICE)
    magnitude = norm * (1 + change * torch.randn(width, generator=draws).to(DEVICE))
    [factor] = factors_of([(magnitude, norm, dtype)])
    return dy, z, factor


def check_scaled(tokens: int, width: int, dtype: torch.dtype, change: float) -> None:
    _, z, factor = numbers(tokens, width, dtype, change)
    expected = dora.scale_on_average_(z.clone(), factor)
    found = dora_gpu.scale_on_average_(z.clone(), factor)
    other = found != expected
    assert other.float().mean() <= FEW
    torch.testing.assert_close(found.double(), expected.double(), rtol=LAST[dtype], atol=1e-7)
    assert (expected != z).any()


SHAPES = [
    (1, 8),
    (16, 256),
    (257, 40),
    (530, 300),
]  # less than a block, one, rows that go on after a cycle, parts of all


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
@pytest.mark.parametrize("change", [3e-4, 0.1])
def test_outputs_are_scaled_as_torchs_operators_scale_them(dtype, tokens, width, change):
    check_scaled(tokens, width, dtype, change)


def test_twin_thresholds_of_another_token_are_seen(monkeypatch):
    real = dora._turns
    monkeypatch.setattr(dora, "_turns", lambda width, device: real(width, device).roll(1, 0))
    with pytest.raises(AssertionError):
        check_scaled(530, 300, torch.float16, 3e-4)


def check_gradients(tokens: int, width: int, dtype: torch.dtype) -> None:
    dy, z, factor = numbers(tokens, width, dtype, 0.1)
    dz, sums = dora_gpu.through_factor(dy, z, factor)
    assert (dz != dora.scaled(dy, factor)).float().mean() <= FEW
    torch.testing.assert_close(dz.double(), dora.scaled(dy, factor).double(), rtol=LAST[dtype], atol=1e-7)
    exact = (dy.double() * z.double()).sum(dim=0)
    assert (sums.double() - exact).norm() <= 1e-6 * exact.norm()
    again = dora_gpu.through_factor(dy, z, factor)
    assert torch.equal(dz, again[0])
    assert torch.equal(sums, again[1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("tokens", "width"), SHAPES)
def test_gradients_pass_the_factor_and_are_summed(dtype, tokens, width):
    check_gradients(tokens, width, dtype)


def test_twin_a_row_that_is_left_out_is_seen(monkeypatch):
    real = dora_gpu.through_factor
    monkeypatch.setattr(dora_gpu, "through_factor", lambda dy, z, factor: real(dy, z.roll(1, 0), factor))
    with pytest.raises(AssertionError):
        check_gradients(257, 40, torch.float16)


def gradients(usable: bool, monkeypatch, bias: bool) -> list[torch.Tensor]:
    """Outputs of two layers with one input, and gradients of x, A, B and m of each."""
    monkeypatch.setattr(adapters, "_fused", lambda tensor, factor: dora_gpu if usable else None)
    draws, kind = torch.Generator().manual_seed(5), torch.float16
    x = torch.randn(2, 150, 48, generator=draws).to(DEVICE, kind).requires_grad_()
    projections, downs, parameters = [], [], []
    for width in (40, 72):
        weight, a, b = (torch.randn(*shape, generator=draws) / 7 for shape in ((width, 48), (4, 48), (width, 4)))
        weight, a, b = weight.to(DEVICE, kind), a.to(DEVICE), b.to(DEVICE)
        norm = factored_norms(weight, row_squares(weight), a, b, 2.0)
        magnitude = norm * (1 + 0.05 * torch.randn(width, generator=draws).to(DEVICE))
        [factor] = factors_of([(magnitude, norm, kind)])
        own = torch.randn(width, generator=draws).to(DEVICE, kind) if bias else None
        projections.append(Projection(weight, own, b, 2.0, (2.0 * b).to(kind), factor))
        downs.append(a.to(kind))
        parameters += [one.requires_grad_() for one in (a, b, magnitude)]
    outputs = adapted(Layers(tuple(projections), tuple(downs), torch.cat(downs)), x, parameters)
    outer = [torch.randn(one.shape, generator=draws).to(one) for one in outputs]
    return [*(one.detach() for one in outputs), *torch.autograd.grad(outputs, [x, *parameters], outer)]


@pytest.mark.parametrize("bias", [False, True])
def test_a_layers_outputs_and_gradients_are_those_of_torchs_operators(bias, monkeypatch):
    fused, plain = gradients(True, monkeypatch, bias), gradients(False, monkeypatch, bias)
    for one, other in zip(fused, plain, strict=True):
        assert (one.double() - other.double()).norm() <= TYPICAL * other.double().norm()
        assert one.dtype == other.dtype
        assert one.shape == other.shape


def test_only_16_bits_near_one_take_them(monkeypatch):
    monkeypatch.setattr(adapters, "_gpu_kernels", lambda device: dora_gpu)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    _, z, factor = numbers(16, 8, torch.float16, 0.1)
    assert adapters._fused(z, factor) is dora_gpu
    assert adapters._fused(z, dataclasses.replace(factor, rare=None, fine=None)) is None
    assert adapters._fused(z, None) is None


def test_they_are_tried_on_a_few_numbers_first():
    assert dora_gpu.is_usable(torch.device(DEVICE))


def fails(*given):
    raise SyntaxError("an operator that this GPU lacks")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("scale_on_average_", fails),
        ("through_factor", fails),
        ("scale_on_average_", lambda z, factor: z),
        ("through_factor", lambda dy, z, factor: (dy, (dy * z).sum(dim=0))),
        ("through_factor", lambda dy, z, factor: (dora.scaled(dy, factor), (dy * z)[1:].float().sum(dim=0))),
    ],
)
def test_twin_those_that_break_or_are_wrong_are_not_used(monkeypatch, name, wrong):
    monkeypatch.setattr(dora_gpu, name, wrong)
    assert not dora_gpu.is_usable(torch.device(DEVICE))
