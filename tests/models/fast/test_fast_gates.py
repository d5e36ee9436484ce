"""Gated activations: which modules have one is found by what they compute, and with it they learn the same.

Who computes is torch here, with the backward pass written out, so that no GPU and no Triton is needed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.zoo_adapters import a_batch, adapted
from surefoot.kernels.forms import Gates
from surefoot.kernels.pointwise import gated, plain_gate
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast.gates import gates

FOUND = {"llama2": 2, "llama3": 2, "mistral": 2, "qwen2": 2, "qwen3": 2, "phi3": 2}
OTHERS = ("gemma2", "gemma3", "opt", "gpt2")
FP32 = 2e-5  # of a gradient's norm; 1e-7 seen


def backward(dy, gate, up):
    s = torch.sigmoid(gate)
    return dy * up * s * (1 + gate * (1 - s)), dy * gate * s


BY_TORCH = Gates(lambda gate, up: F.silu(gate) * up, backward)


def put_in(model, by=BY_TORCH):
    found = list(gates(model, by))
    for one in found:
        one.module.forward = one.forward
    return found


def gradients(model, seed=0):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    sft_loss(model, a_batch()).loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def difference(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - one).norm() / one.norm().clamp(min=1e-6)) for name, one in wanted.items())


@pytest.mark.parametrize("family", FOUND)
def test_gates_of_a_family_are_found_and_learn_the_same(tmp_path, family):
    model = AutoModelForCausalLM.from_pretrained(zoo.ZOO[family](tmp_path / family)).eval()
    plain = gradients(model)
    assert len(put_in(model)) == FOUND[family]
    assert difference(gradients(model), plain) < FP32
    assert not list(gates(model, BY_TORCH))  # those that have another forward are left alone


@pytest.mark.parametrize("family", OTHERS)
def test_other_activations_are_left_alone(tmp_path, family):
    model = AutoModelForCausalLM.from_pretrained(zoo.ZOO[family](tmp_path / family))
    assert not list(gates(model, BY_TORCH))


def test_twin_a_slope_without_its_second_part_is_seen(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(zoo.llama3(tmp_path / "base")).eval()
    plain = gradients(model)
    put_in(model, Gates(BY_TORCH.forward, lambda dy, gate, up: (dy * up * torch.sigmoid(gate), dy * F.silu(gate))))
    assert difference(gradients(model), plain) > 1000 * FP32


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_with_dropout_draw_what_they_drew(tmp_path, kind):
    model = adapted(zoo.llama3(tmp_path / "base"), kind, 1, dropout=0.3).train()
    plain = gradients(model)
    assert len(put_in(model)) == 2
    assert difference(gradients(model), plain) < FP32
    assert difference(gradients(model, seed=1), plain) > 0.01  # twin: other draws


def test_beside_the_adapters_own_kernels(tmp_path):
    model = adapted(zoo.phi3(tmp_path / "base"), "lora", 1).train()
    plain = gradients(model)
    fast_adapters.install(model)
    put_in(model)
    assert difference(gradients(model), plain) < FP32


class Gated(nn.Module):
    """As families write it, with one thing more in between where `more` is given."""

    def __init__(self, activation, more=None):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = activation
        if more is not None:
            self.more = more

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Scaled(Gated):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.01)


class Clamped(Gated):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.more(self.up_proj(x)))


def test_a_gate_is_known_by_what_it_computes():
    assert list(gates(Gated(nn.SiLU()), BY_TORCH))
    for other in (Gated(nn.GELU()), Scaled(nn.SiLU()), Clamped(nn.SiLU(), nn.ReLU6()), nn.Linear(8, 8)):
        assert not list(gates(other, BY_TORCH))


def test_gate_and_up_are_kept_and_nothing_else():
    """As the memory forecast counts it; the plain path keeps what the activation makes of the gate besides."""
    gate, up = (torch.randn(6, 10, requires_grad=True) for _ in range(2))

    def kept(way):
        seen = {}

        def keep(tensor):
            return seen.setdefault(tensor.data_ptr(), tensor)

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            way(gate, up)
        return len(seen)

    assert kept(lambda gate, up: gated(gate, up, BY_TORCH)) == 2
    assert kept(plain_gate) == 3
