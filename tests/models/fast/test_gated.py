"""MLPs with liger-kernel's gated activation, by a stand-in that overwrites gate and up as liger-kernel does."""

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN

from helpers import stand_in_kernels
from helpers.zoo_adapters import a_batch, adapted
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast import gated, pointwise
from surefoot.models.fast.gated import gated_form, install, obstacle
from surefoot.models.fast.last_block import last_block_path

FP32 = 2e-5  # of a gradient's norm; 1e-6 seen


@pytest.fixture(autouse=True)
def package(tmp_path):
    with stand_in_kernels.liger_installed(tmp_path):
        yield


def gradients(model):
    model.zero_grad(set_to_none=True)
    sft_loss(model, a_batch()).loss.backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def difference(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - one).norm() / one.norm().clamp(min=1e-30)) for name, one in wanted.items())


def patched(model):
    return [module for module in model.modules() if "forward" in vars(module)]


@pytest.fixture
def overwritten(monkeypatch):
    """Whether each call may overwrite."""
    asked: list[bool] = []
    real = gated.liger.gated

    def watched(gate, up, form, *, overwrite):
        asked.append(overwrite)
        return real(gate, up, form, overwrite=overwrite)

    monkeypatch.setattr(gated.liger, "gated", watched)
    return asked


@pytest.mark.parametrize(
    ("family", "kind", "fast"),
    [("llama3", "lora", True), ("llama3", "dora", True), ("gemma2", "lora", False), ("qwen3", "dora", False)],
)
def test_adapters_learn_the_same(zoo_model, overwritten, family, kind, fast):
    model = adapted(zoo_model(family), kind, 1).train()
    wanted = gradients(model)
    assert obstacle(model) == ""
    undo = install(model)
    assert len(patched(model)) == model.config.num_hidden_layers
    if fast:
        fast_adapters.install(model)
    overwritten.clear()
    assert difference(gradients(model), wanted) < FP32
    assert set(overwritten) == {kind == "lora"}
    undo()
    assert difference(gradients(model), wanted) < FP32


def test_twin_dora_whose_outputs_are_overwritten_is_refused_or_wrong(zoo_model, monkeypatch):
    model = adapted(zoo_model("llama3"), "dora", 1).train()
    wanted = gradients(model)
    install(model)
    fast_adapters.install(model)
    monkeypatch.setattr(gated, "keeps_no_output", lambda projection: True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(model)
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda tensors: None)
    found = gradients(model)
    wrong = {name for name, one in wanted.items() if difference({0: found[name]}, {0: one}) > 0.1}
    assert wrong
    assert all("magnitude" in name for name in wrong)
    assert {name.split(".")[-4] for name in wrong} == {"gate_proj", "up_proj"}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_with_all_other_paths_and_recomputed_layers(zoo_model, kind):
    model = adapted(zoo_model("llama3"), kind, 1).train()
    wanted = gradients(model)
    for path in (pointwise.rotary_path(), gated.gated_path(), last_block_path()):
        assert path.obstacle(model) == ""
        path.install(model)
    fast_adapters.install(model)
    kept = gradients(model)
    assert difference(kept, wanted) < FP32
    enable_gradient_checkpointing(model)
    assert difference(gradients(model), kept) == 0


def test_hooks_see_what_they_saw(zoo_model, overwritten):
    """One on a projection keeps its output; one on the activation must fire."""
    model = adapted(zoo_model("llama3"), "lora", 1).train()
    install(model)
    first, second = (layer.mlp for layer in model.get_base_model().model.layers)
    seen = []
    first.gate_proj.register_forward_hook(lambda module, given, output: seen.append(output))
    second.act_fn.register_forward_hook(lambda module, given, output: seen.append(output))
    gradients(model)
    assert len(seen) == 2
    assert overwritten == [False]


class Mlp(nn.Module):
    """activation: of ACT2FN; others: further modules."""

    def __init__(self, activation, names=("gate_proj", "up_proj", "down_proj"), **others):
        super().__init__()
        for name, (inputs, outputs) in zip(names, ((8, 16), (8, 16), (16, 8)), strict=True):
            setattr(self, name, nn.Linear(inputs, outputs))
        self.act_fn = ACT2FN[activation]
        for name, other in others.items():
            setattr(self, name, other)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


def test_an_mlp_is_known_by_what_it_computes():
    names = ("gate_proj", "up_proj", "down_proj")
    assert gated_form(Mlp("silu")) == (names, "silu")
    assert gated_form(Mlp("gelu_pytorch_tanh")) == (names, "gelu")
    assert gated_form(Mlp("gelu")) is None  # by the error function
    assert gated_form(Mlp("relu")) is None
    assert gated_form(Swapped("silu")) is None
    assert gated_form(Mlp("silu", dropout=nn.Dropout(0.0))) is None
    assert gated_form(Mlp("silu", names=("gate", "up", "down"))) is None
    assert gated_form(nn.Linear(8, 8)) is None


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_models_without_gates_are_left_alone(zoo_model, family):
    model = adapted(zoo_model(family), "lora", 1)
    assert obstacle(model)
    install(model)
    assert not patched(model)
