"""Norms and turns by blocks of rows against the plain formulas in float64: outputs, gradients, types, what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surefoot.kernels import pointwise
from surefoot.kernels.pointwise import NormForm, plain_norm, plain_rotary, rms_norm, rotary

LLAMA = NormForm(1e-5, 0.0, narrow_first=True)
GEMMA = NormForm(1e-6, 1.0, narrow_first=False)
OLMO = NormForm(1e-6, 0.0, narrow_first=False)
FORMS = (LLAMA, GEMMA, OLMO)
EXACT = 1e-12  # float64 in another order of sums; 3e-16 seen
NO_WORSE = 1.1  # error against float64, as a multiple of the plain path's; up to 1.04 seen in fp32, 1.00 in 16 bits
WIDTH, ROWS = 768, 300  # 128 rows are a block: two whole ones and a part


def inputs(dtype, rows=ROWS, width=WIDTH, size=1.0):
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(2, rows // 2, width, generator=draws) * size
    weight, outer = torch.randn(width, generator=draws), torch.randn(2, rows // 2, width, generator=draws)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), outer.to(dtype)


def passed(way, given, outer):
    """The output and the gradients of what learns."""
    output = way(*given)
    return [output.detach(), *torch.autograd.grad(output, [one for one in given if one.requires_grad], outer)]


def in_double(tensors):
    return [one.detach().double().requires_grad_(one.requires_grad) for one in tensors]


def largest(found, wanted):
    pairs = [(one.detach().double(), two.detach()) for one, two in zip(found, wanted, strict=True)]
    return max(float((one - two).norm() / two.norm()) for one, two in pairs)


def norm_error(form, size=1.0):
    x, weight, outer = inputs(torch.float64, size=size)
    wanted = passed(lambda x, w: plain_norm(x, w, form), (x, weight), outer)
    return largest(passed(lambda x, w: rms_norm(x, w, form), (x, weight), outer), wanted)


@pytest.mark.parametrize("size", [1.0, 1e-3, 100.0])
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_is_the_formula(form, size):
    assert norm_error(form, size) < EXACT


@pytest.mark.parametrize("changed", [{"shift": 0.5}, {"eps": 0.01}])
def test_twin_another_form_is_seen(changed, monkeypatch):
    right = pointwise.norm_forward
    monkeypatch.setattr(pointwise, "norm_forward", lambda x, w, form: right(x, w, replace(form, **changed)))
    assert norm_error(GEMMA) > 1e6 * EXACT


def test_twin_a_backward_pass_without_its_inner_product_is_seen(monkeypatch):
    right = pointwise.norm_backward

    def without(dy, x, s, w, form, trains):
        return dy * w * s, right(dy, x, s, w, form, trains=True)[1]

    monkeypatch.setattr(pointwise, "norm_backward", without)
    assert norm_error(LLAMA) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_a_norm_is_as_near_to_float64_as_the_plain_one(form, dtype):
    x, weight, outer = inputs(dtype)
    exact = passed(lambda x, w: plain_norm(x, w, form), in_double((x, weight)), outer.double())
    plain = passed(lambda x, w: plain_norm(x, w, form), (x, weight), outer)
    fused = passed(lambda x, w: rms_norm(x, w, form), (x, weight), outer)
    for one, other, wanted in zip(fused, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert largest([one], [wanted]) < NO_WORSE * largest([other], [wanted])


def test_an_fp32_weight_over_16_bits_has_the_types_of_the_plain_path():
    x, weight, _ = inputs(torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    for form in FORMS:
        plain, fused = plain_norm(x, weight, form), rms_norm(x, weight, form)
        assert fused.dtype == plain.dtype == (torch.float32 if form.narrow_first else torch.bfloat16)
        assert float((fused - plain).detach().abs().max()) < 0.05  # one unit of bf16 at 4
        found = torch.autograd.grad(fused.sum(), (x, weight))
        assert [one.dtype for one in found] == [torch.bfloat16, torch.float32]


def test_a_frozen_weight_gets_no_gradient():
    x, weight, outer = inputs(torch.float64)
    weight.requires_grad_(False)
    output = rms_norm(x, weight, LLAMA)
    output.backward(outer)
    assert weight.grad is None
    assert largest([x.grad], [torch.autograd.grad(plain_norm(x, weight, LLAMA), x, outer)[0]]) < EXACT


def test_rows_with_strides_and_no_rows():
    x, weight, _ = inputs(torch.float64)
    apart = torch.randn(5, 2 * WIDTH, dtype=torch.float64)[:, ::2].requires_grad_()
    outer = torch.randn(WIDTH, 5, dtype=torch.float64).T
    wanted = passed(lambda x, w: plain_norm(x, w, LLAMA), (apart, weight), outer)
    assert largest(passed(lambda x, w: rms_norm(x, w, LLAMA), (apart, weight), outer), wanted) < EXACT
    none = rms_norm(x[:, :0], weight, LLAMA)
    assert none.shape == (2, 0, WIDTH)
    assert torch.autograd.grad(none.sum(), x)[0].abs().sum() == 0


def test_what_is_not_a_number_stays_so():
    x, weight, _ = inputs(torch.float32)
    with torch.no_grad():
        x[0, 3, 5] = float("inf")
    fused, plain = rms_norm(x, weight, LLAMA), plain_norm(x, weight, LLAMA)
    assert torch.equal(fused.isnan(), plain.isnan())
    assert int(fused.isnan().sum()) > 0


def turns(dtype=torch.float64, width=16, cos_dtype=None):
    draws = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 7, heads, 16, generator=draws).transpose(1, 2) for heads in (4, 2))
    cos, sin = (torch.randn(2, 7, width, generator=draws).to(cos_dtype or dtype) for _ in range(2))
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), cos, sin


def turn_error(width):
    q, k, cos, sin = turns(width=width)
    outer = torch.randn_like(q), torch.randn_like(k)
    found = rotary(q, k, cos, sin)
    wanted = [plain_rotary(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k)]
    gradients = [torch.autograd.grad(made, (q, k), outer) for made in (found, wanted)]
    return largest([*found, *gradients[0]], [*wanted, *gradients[1]])


@pytest.mark.parametrize("width", [16, 8])
def test_a_turn_is_the_formula(width):
    """With other numbers in both halves of cos and sin than a position has, and with heads of which a part passes."""
    assert turn_error(width) < EXACT


@pytest.mark.parametrize("width", [16, 8])
def test_twin_a_backward_pass_that_turns_the_same_way_is_seen(width, monkeypatch):
    monkeypatch.setattr(pointwise, "_rotate_back", pointwise._rotate)
    assert turn_error(width) > 0.1


def test_heads_may_stand_behind_tokens():
    q, k, cos, sin = turns()
    behind = rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    for one, other in zip(behind, rotary(q, k, cos, sin), strict=True):
        assert torch.equal(one.transpose(1, 2), other)


@pytest.mark.parametrize("cos_dtype", [torch.bfloat16, torch.float32])
def test_turns_in_16_bits_have_the_types_of_the_plain_path_and_no_larger_error(cos_dtype):
    q, k, cos, sin = turns(torch.bfloat16, cos_dtype=cos_dtype)
    given = (q, cos.unsqueeze(1), sin.unsqueeze(1))
    outer = torch.randn_like(q)
    exact = passed(plain_rotary, in_double(given), outer.double())
    plain = passed(plain_rotary, given, outer.to(plain_rotary(*given).dtype))
    fused = passed(lambda q, cos, sin: rotary(q, k, cos.squeeze(1), sin.squeeze(1))[0], given, outer.to(plain[0].dtype))
    for one, other, wanted in zip(fused, plain, exact, strict=True):
        assert one.dtype == other.dtype
        assert largest([one], [wanted]) <= NO_WORSE * largest([other], [wanted])


def kept_bytes(way, x, *others):
    """Of the tensors that the backward pass holds, but for the weight; what shares memory counts once."""
    seen = {}

    def hook(tensor):
        seen[tensor.untyped_storage().data_ptr()] = (tensor, tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(hook, lambda tensor: tensor):
        output = way(x, *others)
    found = sum(size for tensor, size in seen.values() if tensor.numel() > max(one.numel() for one in others))
    return found + sum(size for tensor, size in seen.values() if tensor.shape[-1] == 1), output


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_said_to_be_kept_is_kept(dtype, trains):
    x, weight, _ = inputs(dtype)
    weight.requires_grad_(trains)
    found, _ = kept_bytes(lambda x, w: rms_norm(x, w, LLAMA), x, weight)
    assert found == ROWS * (WIDTH * dtype.itemsize + 4)
    # The plain norm keeps fp32 numbers, and h where the weight trains.
    found, _ = kept_bytes(lambda x, w: plain_norm(x, w, LLAMA), x, weight)
    assert found == ROWS * (WIDTH * 4 + 4 + (WIDTH * dtype.itemsize if trains else 0))


def test_the_order_of_sums_depends_on_the_shape_alone():
    x, weight, outer = inputs(torch.float32)
    found = [passed(lambda x, w: rms_norm(x, w, LLAMA), (x, weight), outer) for _ in range(2)]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
