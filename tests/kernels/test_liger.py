"""liger-kernel's rotations and gated activations, by a stand-in that overwrites what liger-kernel overwrites."""

import pytest
import torch

from helpers import stand_in_kernels
from surefoot.kernels import liger, pointwise

FP32 = 1e-6  # of a tensor's norm; 1e-7 seen


@pytest.fixture(autouse=True)
def package(tmp_path):
    with stand_in_kernels.liger_installed(tmp_path):
        yield


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def leaf(tensor):
    return tensor.clone().requires_grad_()


def difference(found, wanted):
    return max(
        float((one - other).detach().norm() / other.detach().norm()) for one, other in zip(found, wanted, strict=True)
    )


def heads(count, seed):
    """[2, H, 5, 16] in the memory of a projection's output."""
    return numbers(2, 5, count, 16, seed=seed).transpose(1, 2)


@pytest.mark.parametrize(("rows", "turned"), [(1, 16), (2, 16), (2, 8)])
def test_rotations_are_the_plain_ones_and_write_into_nothing_they_are_given(rows, turned):
    q, k, dq, dk = (heads(count, seed) for seed, count in enumerate((4, 2, 4, 2)))
    cos, sin = (numbers(rows, 5, turned // 2, seed=seed).repeat(1, 1, 2) for seed in (5, 6))
    given = [leaf(q), leaf(k)]
    wanted = [pointwise.plain_rotary(one, cos.unsqueeze(1), sin.unsqueeze(1)) for one in given]
    gradients = torch.autograd.grad(wanted, given, (dq, dk))
    outer = [dq.clone(), dk.clone()]
    found = liger.rotary(*given, cos, sin)
    assert difference(found, wanted) < FP32
    assert difference(torch.autograd.grad(found, given, outer), gradients) < FP32
    assert all(map(torch.equal, [*given, *outer], [q, k, dq, dk]))


def test_twin_without_copies_queries_and_gradients_are_overwritten(monkeypatch):
    monkeypatch.setattr(liger, "_copy", lambda x, dtype: x)
    q, k, dq = heads(4, 0), heads(2, 1), heads(4, 2)
    cos, sin = (numbers(1, 5, 8, seed=seed).repeat(1, 1, 2) for seed in (5, 6))
    given, outer = leaf(q), dq.clone()
    found = liger.rotary(given, k, cos, sin)[0]
    torch.autograd.grad(found, given, outer)
    assert not torch.equal(given, q)
    assert not torch.equal(outer, dq)


def test_other_shapes_and_types_of_rotations_are_ours(monkeypatch):
    monkeypatch.setattr(liger._Rotary, "apply", lambda *given: pytest.fail("not for liger-kernel"))
    q, k = heads(4, 0), heads(2, 1)
    cos, sin = (numbers(1, 5, 8, seed=seed).repeat(1, 1, 2) for seed in (5, 6))
    wanted = pointwise.rotary(q, k, cos, sin)
    found = liger.rotary(*(one.transpose(1, 2) for one in (q, k)), cos, sin, unsqueeze_dim=2)
    assert difference([one.transpose(1, 2) for one in found], wanted) < FP32
    assert liger.rotary(*(one.double() for one in (q, k, cos, sin)))[0].dtype == torch.float64


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("form", liger.FORMS)
def test_gated_activations_are_the_plain_ones(form, overwrite):
    gate, up, dy = (numbers(3, 7, 24, seed=seed) for seed in range(3))
    given = [leaf(gate), leaf(up)]
    plain = liger.plain_gated(*given, form)
    wanted = torch.autograd.grad(plain, given, dy)
    used = [one.clone() for one in given]  # as a projection makes them
    found = liger.gated(*used, form, overwrite=overwrite)
    assert difference([found], [plain]) < FP32
    assert difference(torch.autograd.grad(found, given, dy), wanted) < FP32
    assert [torch.equal(one, other) for one, other in zip(used, (gate, up), strict=True)] == [not overwrite] * 2


def test_gate_and_up_are_kept_alone():
    """The memory plan counts on it."""
    kept = []
    gate, up = leaf(numbers(3, 8)), leaf(numbers(3, 8, seed=1))
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        liger.gated(gate, up, "silu")
        assert {one.data_ptr() for one in kept} == {gate.data_ptr(), up.data_ptr()}
        kept.clear()
        liger.plain_gated(gate, up, "silu")
        assert len({one.data_ptr() for one in kept}) == 3  # twin


def test_the_two_forms_differ():
    gate, up = numbers(3, 8), numbers(3, 8, seed=1)
    assert difference([liger.gated(gate, up, "silu")], [liger.gated(gate, up, "gelu")]) > 0.1


def test_what_was_overwritten_is_not_read_by_anyone(monkeypatch):
    """Autograd refuses it; twin: without the new version it would hand out gradients as activations."""

    def again():
        gate, up = leaf(numbers(3, 8)), leaf(numbers(3, 8, seed=1))
        made = gate.clone()
        square = made * made  # keeps it
        y = liger.gated(made, up.clone(), "silu", overwrite=True)
        torch.autograd.grad(y.sum(), gate, retain_graph=True)
        return torch.autograd.grad(square.sum(), gate)[0], 2 * gate

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        again()
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda tensors: None)
    found, wanted = again()
    assert difference([found], [wanted]) > 0.1


def test_float64_is_computed_in_float64():
    gate, up = numbers(3, 8).double(), numbers(3, 8, seed=1).double()
    assert torch.equal(liger.gated(gate, up, "gelu"), liger.plain_gated(gate, up, "gelu"))


class Broken(Exception):
    """As Triton's errors: not a RuntimeError."""


def test_norms_are_the_plain_ones_and_their_errors_those_of_the_run(monkeypatch):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

    x, weight, form = leaf(numbers(3, 8)), leaf(numbers(8, seed=1)), pointwise.NormForm(1e-5, 0.0, narrow_first=True)
    plain = pointwise.plain_norm(x, weight, form)
    found = liger.rms_norm(x, weight, form)
    wanted = torch.autograd.grad(plain.sum(), (x, weight))
    assert difference(torch.autograd.grad(found.sum(), (x, weight), retain_graph=True), wanted) < FP32

    def fail(ctx, dy):
        raise Broken("out of resource")

    monkeypatch.setattr(LigerRMSNormFunction, "backward", fail)
    with pytest.raises(RuntimeError, match="out of resource"):
        found.sum().backward()


def test_errors_of_triton_are_errors_of_the_run(monkeypatch):
    def fail(form):
        raise Broken("out of resource\nmore")

    monkeypatch.setattr(liger, "_gated_kernels", fail)
    with pytest.raises(RuntimeError, match="out of resource"):
        liger.gated(numbers(3, 8), numbers(3, 8), "silu")
