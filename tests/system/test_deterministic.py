"""torch's switch for deterministic operators is on in the backward passes of attention, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from helpers import pretend_gpu
from surefoot.system import deterministic
from surefoot.system.deterministic import deterministic_attention, from_kernel, switches_kept

REAL = torch.cuda.is_available() and not pretend_gpu.is_here()


@pytest.fixture
def here(monkeypatch):
    """Kernels of a CPU count as those of a GPU."""
    real = deterministic._kernel_of
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    seen: list[str] = []

    def kernel_of(output):
        found = real(output)
        seen.append(found.name() if found else "")
        return found

    monkeypatch.setattr(deterministic, "_kernel_of", kernel_of)
    return seen


class Watched(torch.autograd.Function):
    """The identity, whose backward pass notes whether the switch is on."""

    @staticmethod
    def forward(ctx, tensor, notes):
        ctx.notes = notes
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.notes.append(torch.are_deterministic_algorithms_enabled())
        return gradient, None


def numbers() -> torch.Tensor:
    return torch.randn(1, 2, 8, 16, requires_grad=True)


def attention(q: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def test_it_is_on_in_the_kernels_backward_pass_alone(here, monkeypatch):
    set_, notes, changes = deterministic._set, [], []
    monkeypatch.setattr(deterministic, "_set", lambda *values: changes.append(values) or set_(*values))
    with deterministic_attention():
        output = Watched.apply(attention(Watched.apply(numbers(), notes)), notes)
        output.sum().backward()
    assert here == ["ScaledDotProductFlashAttentionForCpuBackward0"]
    assert notes == [False, False]  # before and behind the kernel
    assert changes == [(True, False, False), (False, False, True), (False, False, True)]  # on, off, the context's end


def test_after_the_context_too_as_a_graph_outlives_it(here, monkeypatch):
    with deterministic_attention():
        output = attention(numbers())
    changes = []
    monkeypatch.setattr(deterministic, "_set", lambda *values: changes.append(values[0]))
    output.sum().backward()
    assert changes == [True, False]
    attention(numbers()).sum().backward()  # twin: outside of it nothing is switched
    assert changes == [True, False]


class OutOfMemory(RuntimeError):
    pass


def broken_attention() -> torch.Tensor:
    """Whose kernel raises an error in its backward pass, where the switch is on."""
    notes: list[bool] = []

    def unpack(tensor):
        notes.append(torch.are_deterministic_algorithms_enabled())
        raise OutOfMemory(str(notes[0]))

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
        return attention(numbers()).sum()


def test_a_backward_pass_that_breaks_off_leaves_nothing_on(here):
    with pytest.raises(OutOfMemory, match="True"), deterministic_attention():
        broken_attention().backward()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch._C._get_deterministic_fill_uninitialized_memory()


def test_twin_outside_of_a_context_it_would(here):
    with deterministic_attention():
        output = broken_attention()
    with switches_kept():
        with pytest.raises(OutOfMemory):
            output.backward()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_kernel_that_sdpa_does_not_call_is_switched_at_its_output(here):
    notes: list[bool] = []
    with deterministic_attention():
        from_kernel(Watched.apply(numbers(), notes)).sum().backward()
    from_kernel(Watched.apply(numbers(), notes)).sum().backward()  # twin: outside
    assert notes == [True, False]


def test_what_the_caller_had_switched_on_stays(here):
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with deterministic_attention():
            attention(numbers()).sum().backward()
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_without_gradients_and_for_other_kernels_nothing_is_done(here):
    with deterministic_attention(), torch.no_grad():
        attention(numbers())
    with deterministic_attention(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attention(numbers()).sum().backward()
    assert here == ["", ""]
    assert not deterministic.is_active()


def test_contexts_may_overlap():
    real = F.scaled_dot_product_attention
    first, second = deterministic_attention(), deterministic_attention()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert deterministic.is_active()
    assert F.scaled_dot_product_attention is not real
    second.__exit__(None, None, None)
    assert not deterministic.is_active()
    assert F.scaled_dot_product_attention is real


def test_attention_of_a_cpu_is_left_alone(monkeypatch):
    changes = []
    with deterministic_attention():
        monkeypatch.setattr(deterministic, "_set", lambda *values: changes.append(values))
        attention(numbers()).sum().backward()
        assert changes == []


def gradients(times: int) -> list[tuple[torch.Tensor, ...]]:
    """Of attention on the GPU at a length at which its sums are split."""
    draws = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(2, heads, 4096, 128, generator=draws, device="cuda").bfloat16().requires_grad_()
        for heads in (32, 8, 8)
    ]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        outputs = [F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True) for _ in range(times)]
    return [torch.autograd.grad(output.float().square().sum(), inputs) for output in outputs]


@pytest.mark.gpu
@pytest.mark.skipif(not REAL, reason="there is no NVIDIA GPU")
@pytest.mark.parametrize("inside", [True, False])
def test_gradients_are_the_same_each_time(inside):
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("torch's flash kernel needs an Ampere GPU")
    with deterministic_attention() if inside else torch.enable_grad():
        first, *others = gradients(4)
    same = [all(torch.equal(*pair) for pair in zip(first, other, strict=True)) for other in others]
    assert all(same) is inside  # twin: outside they are not
