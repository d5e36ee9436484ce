"""Models with surefoot's own norms and turns against transformers' modules, over families, types and ways of use."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.zoo_adapters import a_batch, adapted
from surefoot.kernels import pointwise
from surefoot.methods.losses.sft import sft_loss
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.fast import adapters as fast_adapters
from surefoot.models.fast import pointwise as fast_pointwise
from surefoot.models.fast.pointwise import install, norm_form, obstacle
from surefoot.models.forward import logits_at

WITHOUT = ("opt", "gpt2")  # neither RMSNorm nor rotary positions
FP32 = 2e-5  # of a gradient's norm; 2.4e-6 seen
DOUBLE = 2e-5  # the same: transformers' norms compute in fp32 in a float64 model as well
NO_WORSE = 1.15  # mean error against float64, as a multiple of the plain path's; the seeds of one arm spread by 0.1


def learner(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def gradients(model, context=nullcontext):
    model.zero_grad(set_to_none=True)
    with context():
        loss = sft_loss(model, a_batch()).loss
    loss.backward()
    return {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}


def autocast(dtype):
    return lambda: torch.autocast("cpu", dtype=dtype)


def difference(found, wanted):
    assert found.keys() == wanted.keys()
    return max(float((found[name] - one).norm() / one.norm().clamp(min=1e-30)) for name, one in wanted.items())


def norms(model):
    return sum(type(module).__name__.endswith("Norm") for module in model.modules())


def norms_and_turns(model):
    """All there are: every norm, and each layer's attention."""
    return norms(model) + model.config.num_hidden_layers


def patched(model):
    return [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("family", [name for name in zoo.ZOO if name not in WITHOUT])
def test_every_family_learns_the_same(zoo_model, family):
    model = learner(zoo_model(family))
    assert obstacle(model) == ""
    for one, limit in ((copy.deepcopy(model).double(), DOUBLE), (model, FP32)):
        plain = gradients(one)
        undo = install(one)
        assert len(patched(one)) == norms_and_turns(one)
        found = gradients(one)
        assert 0 < difference(found, plain) < limit
        undo()
        assert not patched(one)
        assert difference(gradients(one), plain) == 0


@pytest.mark.parametrize("family", WITHOUT)
def test_models_without_are_left_alone(zoo_model, family):
    model = learner(zoo_model(family))
    assert obstacle(model)
    install(model)
    assert not patched(model)


def test_twin_another_inner_product_is_seen(zoo_model, monkeypatch):
    model = learner(zoo_model("llama3"))
    plain = gradients(model)

    right = pointwise.norm_backward

    def broken(*given, **how):
        dx, dw = right(*given, **how)
        return dx * 1.01, dw

    monkeypatch.setattr(pointwise, "norm_backward", broken)
    install(model)
    assert difference(gradients(model), plain) > 100 * FP32


@pytest.mark.parametrize("way", ["weights", "autocast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_near_to_float64_as_the_plain_path(zoo_model, dtype, way):
    errors = {"plain": 0.0, "fused": 0.0}
    for family in ("llama3", "qwen3", "gemma2"):
        model = learner(zoo_model(family))
        exact = gradients(copy.deepcopy(model).double())
        if way == "weights":
            model.to(dtype)
        size = sum(float(one.norm() ** 2) for one in exact.values()) ** 0.5
        for arm in errors:
            undo = install(model) if arm == "fused" else lambda: None
            found = gradients(model, nullcontext if way == "weights" else autocast(dtype))
            undo()
            errors[arm] += sum(float((found[name] - one).norm() ** 2) for name, one in exact.items()) ** 0.5 / size
    assert errors["fused"] < NO_WORSE * errors["plain"]


def test_types_between_modules_are_those_of_the_plain_path(zoo_model):
    model = learner(zoo_model("llama3"))
    seen = []
    for module in model.modules():
        module.register_forward_hook(lambda module, given, output: seen.append(getattr(output, "dtype", None)))
    for context in (nullcontext, autocast(torch.bfloat16)):
        gradients(model, context)
        plain = seen.copy()
        seen.clear()
        undo = install(model)
        gradients(model, context)
        undo()
        assert seen == plain
        seen.clear()


def test_hooks_on_norms_and_attention_fire_forward_and_backward(zoo_model):
    model = learner(zoo_model("qwen3"))
    install(model)
    fired = []
    modules = patched(model)
    for number, module in enumerate(modules):
        module.register_forward_hook(lambda *_, number=number: fired.append(number))
        module.register_full_backward_hook(lambda *_, number=number: fired.append(-1 - number))
    gradients(model)
    assert set(fired) == {*range(len(modules)), *(-1 - number for number in range(len(modules)))}


def test_a_copy_of_a_model_computes_with_its_own_weights(zoo_model):
    model = learner(zoo_model("llama3"))
    install(model)
    before = gradients(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
        other.model.layers[0].self_attn.q_proj.weight.mul_(2)
    assert difference(gradients(model), before) == 0
    assert difference(gradients(other), before) > 0.1
    assert len(patched(other)) == norms_and_turns(other)


@pytest.mark.parametrize("family", ["llama3", "gemma3"])
def test_recomputed_layers_give_the_same_bits(zoo_model, family):
    model = learner(zoo_model(family))
    install(model)
    kept = gradients(model)
    enable_gradient_checkpointing(model)
    assert difference(gradients(model), kept) == 0


def test_names_and_values_of_parameters_stay(zoo_model):
    model = learner(zoo_model("gemma2"))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    install(model)
    gradients(model)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(one, after[name]) for name, one in before.items())


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_beside_the_adapters_own_kernels_layers_with_one_input_stay_together(zoo_model, kind, monkeypatch):
    together = []
    plain = fast_adapters.adapted

    def watched(layers, *others):
        together.append(len(layers.projections))
        return plain(layers, *others)

    model = adapted(zoo_model("llama3"), kind, 1).train()
    wanted = gradients(model)
    fast_adapters.install(model)
    install(model)
    monkeypatch.setattr(fast_adapters, "adapted", watched)
    assert difference(gradients(model), wanted) < FP32
    assert together == [3, 1, 2, 1] * 2


def test_norms_that_peft_trains_a_copy_of(zoo_model):
    model = adapted(zoo_model("llama3"), "lora", 1, modules_to_save=("norm",)).train()
    wanted = gradients(model)
    assert any("modules_to_save" in name for name in wanted)
    install(model)
    assert len(patched(model)) == norms_and_turns(model)  # the copies as well
    assert difference(gradients(model), wanted) < FP32


@torch.no_grad()
def test_answers_are_written_with_a_cache_as_before(zoo_model):
    model = learner(zoo_model("mistral")).eval()
    ids = torch.arange(5, 25).unsqueeze(0)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    logits = logits_at(model, a_batch(), torch.arange(18))
    install(model)
    assert torch.equal(model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0), plain)
    assert float((logits_at(model, a_batch(), torch.arange(18)) - logits).abs().max()) < 1e-5


class Scaled(nn.Module):
    """A module that looks like a norm and is one of something else."""

    def __init__(self, power):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6
        self.power = power

    def forward(self, x):
        return (self.weight * x * (x.pow(2).mean(-1, keepdim=True) + self.eps) ** self.power).type_as(x)


def test_a_module_is_known_by_what_it_computes():
    assert norm_form(Scaled(-0.5)) is not None
    assert norm_form(Scaled(-0.49)) is None
    assert norm_form(nn.LayerNorm(32, bias=False)) is None
    assert norm_form(nn.Linear(32, 32)) is None
    other = Scaled(-0.5)
    other.eps = 1e-5
    assert norm_form(other) != norm_form(Scaled(-0.5))


def interleaved(q, k, cos, sin):
    """As in GPT-J: neighbors turn, not halves."""

    def turn(x):
        pairs = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
        return x * cos.unsqueeze(1) + pairs * sin.unsqueeze(1)

    return turn(q), turn(k)


def test_attention_that_turns_otherwise_is_left_alone(zoo_model, monkeypatch):
    model = learner(zoo_model("llama3"))
    layer = type(model.model.layers[0].self_attn)
    monkeypatch.setitem(layer.forward.__globals__, fast_pointwise._ROTARY, interleaved)
    undo = install(model)
    assert len(patched(model)) == norms(model)
    undo()
    monkeypatch.undo()
    install(model)
    assert len(patched(model)) == norms_and_turns(model)
