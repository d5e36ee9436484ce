"""LoRA on experts by grouped products: against PEFT's own forward, one linear layer for each expert, and 16 bits."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from helpers.experts import MOE, expert_parameters, moe_model
from helpers.plans import adapter_plan, linear_names
from surefoot.kernels import experts as kernel
from surefoot.kernels.experts import Matrices, adapted_experts, plain_experts
from surefoot.models.adapters import add_adapter
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast import experts as fast_experts
from surefoot.models.peft import ParamWrapper, PeftModel

FP32_RELATIVE = 1e-5  # fp32 in another order: a few ulps (6e-8) times the depth of these tiny models
IDS = torch.arange(24).reshape(2, 12) * 7 % 70


def adapted(name: str, rank: int = 4, dtype: torch.dtype = torch.float32, **changes) -> PeftModel:
    model = moe_model(name, dtype, **changes)
    plan = dataclasses.replace(adapter_plan(linear_names(model), rank=rank), parameters=expert_parameters(model))
    found = add_adapter(model, plan, seed=1, base="base", autocast=dtype != torch.float32)
    generator = torch.Generator().manual_seed(3)
    for parameter in found.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return found.train()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def outcome(model: PeftModel) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    out = model(input_ids=IDS, use_cache=False).logits
    out.sin().sum().backward()
    return out.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def peft_forwards(model: PeftModel, monkeypatch) -> list[str]:
    """Where PEFT's own forward runs from now on."""
    seen: list[str] = []
    own = ParamWrapper._activate_lora

    def activate(self, adapters):
        seen.append(self.parameter_name)
        return own(self, adapters)

    monkeypatch.setattr(ParamWrapper, "_activate_lora", activate)
    return seen


@pytest.mark.parametrize("rank", [4, 3])  # 3: no strides that a grouped product takes
@pytest.mark.parametrize("name", MOE)
def test_it_is_pefts_own_forward_and_gradient(name, rank, monkeypatch):
    model = adapted(name, rank)
    expected = outcome(model)
    undo = fast_adapters.install(model)
    seen = peft_forwards(model, monkeypatch)
    found = outcome(model)
    assert seen == []
    assert [relative(a, b) <= FP32_RELATIVE for a, b in zip(found, expected, strict=True)] == [True, True]
    enable_gradient_checkpointing(model)
    again = outcome(model)
    assert torch.equal(again[0], found[0])
    assert torch.equal(again[1], found[1])
    with model.disable_adapter(), torch.no_grad():
        off = model(input_ids=IDS, use_cache=False).logits
    undo()
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(off, model(input_ids=IDS, use_cache=False).logits)
    assert torch.equal(outcome(model)[0], expected[0])
    assert seen


def test_twin_b_read_expert_slowest_is_seen(monkeypatch):
    model = adapted("mixtral")
    expected = outcome(model)

    def slowest(experts, name, pair):
        a, b, scale = pair
        count = experts.num_experts
        return own(experts, name, (a, b.view(len(b), count, -1).transpose(1, 2).reshape(b.shape), scale))

    own = fast_experts._matrices
    monkeypatch.setattr(fast_experts, "_matrices", slowest)
    fast_adapters.install(model)
    assert relative(outcome(model)[0], expected[0]) > 100 * FP32_RELATIVE


def random_experts(dtype: torch.dtype = torch.float64, small: float = 1.0):
    draw = torch.Generator().manual_seed(2)
    experts, inside, rank = 5, 8, 4

    def matrix(*shape: int, times: float = 0.3) -> torch.Tensor:
        return (times * torch.randn(*shape, generator=draw, dtype=torch.float64)).to(dtype)

    def one(inputs: int, outputs: int) -> Matrices:
        a, b = matrix(experts * rank, inputs), matrix(outputs, rank * experts, times=0.3 * small)
        return Matrices(matrix(experts, inputs, outputs), matrix(experts, outputs), a, b, 1.7)

    x = matrix(11, 16, times=1.0)
    index = torch.stack([torch.randperm(4, generator=draw)[:2] for _ in range(11)])  # one expert has no tokens
    return x, index, matrix(11, 2).abs(), one(16, 2 * inside), one(inside, 16)


def gate(both: torch.Tensor) -> torch.Tensor:
    first, second = both.chunk(2, dim=-1)
    return first.sigmoid() * second


def test_the_kernel_is_the_loop_in_float64():
    x, index, share, up, down = random_experts()
    leaves = [one.requires_grad_() for one in (x, share, up.a, up.b, down.a, down.b)]
    outputs = [make(x, index, share, up, down, gate) for make in (adapted_experts, plain_experts)]
    first, second = ([*torch.autograd.grad(out.sin().sum(), leaves), out] for out in outputs)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(first, second, strict=True))
    halved = dataclasses.replace(down, scale=down.scale / 2)  # twin
    assert relative(adapted_experts(x, index, share, up, halved, gate), outputs[1]) > 1e-3


def test_in_16_bits_a_small_change_is_not_rounded_away():
    """B A a thousandth of W: added to W in bf16, as PEFT does, most of it is lost."""
    exact = random_experts(torch.float64, small=1e-3)

    def change(experts, fold: bool) -> torch.Tensor:
        x, index, share, up, down = experts
        bare = [dataclasses.replace(one, a=None, b=None) for one in (up, down)]
        with_it = [folded(one) for one in (up, down)] if fold else [up, down]
        make = plain_experts if x.dtype == torch.float64 else adapted_experts
        return make(x, index, share, *with_it, gate).double() - make(x, index, share, *bare, gate).double()

    def folded(one: Matrices) -> Matrices:
        experts = len(one.weight)
        a, b = one.a.view(experts, -1, one.a.shape[1]), one.b.view(len(one.b), -1, experts)
        delta = torch.einsum("eri,ore->eio", a, b) * one.scale
        return Matrices((one.weight + delta).to(one.weight.dtype), one.bias)

    wanted = change(exact, fold=False)
    x, index, share, up, down = exact

    def rounded(one: Matrices) -> Matrices:
        low = {name: getattr(one, name).to(torch.bfloat16) for name in ("weight", "bias", "a", "b")}
        return dataclasses.replace(one, **low)

    low = (x.to(torch.bfloat16), index, share.to(torch.bfloat16), rounded(up), rounded(down))
    ours, pefts = (relative(change(low, fold), wanted) for fold in (False, True))
    assert ours < pefts / 1.5


def test_strides_that_a_grouped_product_cannot_take_go_one_by_one(monkeypatch):
    x, index, share, up, down = random_experts()
    expected = adapted_experts(x, index, share, up, down, gate)
    monkeypatch.setattr(kernel, "_is_aligned", lambda tensor: False)
    assert torch.allclose(adapted_experts(x, index, share, up, down, gate), expected, rtol=1e-12, atol=1e-13)
