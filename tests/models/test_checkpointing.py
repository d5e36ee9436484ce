"""Gradient checkpointing computes each layer twice and changes no gradient, dropout included."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.plans import adapter_plan, linear_names
from helpers.tiny_models import tiny_llama
from surefoot.models.adapters import add_adapter
from surefoot.models.checkpointing import checkpointed_layers, enable_gradient_checkpointing, has_gradient_checkpointing
from surefoot.models.forward import causal_model

IDS = torch.arange(40).reshape(2, 20) * 7 % 300


def gradients_and_calls(model) -> tuple[dict[str, torch.Tensor], int]:
    """Gradients by name, and how often the first layer's attention ran."""
    calls = []
    first = causal_model(model).get_submodule("model.layers.0.self_attn")
    handle = first.register_forward_hook(lambda *_: calls.append(1))
    model.zero_grad()
    torch.manual_seed(3)
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    handle.remove()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}, len(calls)


@pytest.mark.parametrize("kind", ["full", "lora", "dora"])
def test_gradients_are_the_same_and_layers_run_twice(tmp_path, kind):
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "model"))
    if kind != "full":
        model = add_adapter(model, adapter_plan(linear_names(model), kind, dropout=0.2), seed=1, base="base")
    model.train()
    assert not has_gradient_checkpointing(model)
    plain, once = gradients_and_calls(model)
    enable_gradient_checkpointing(model)
    assert has_gradient_checkpointing(model)
    again, twice = gradients_and_calls(model)
    assert (once, twice) == (1, 2)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    model.eval()
    assert gradients_and_calls(model)[1] == 1  # evaluation keeps nothing and repeats nothing


def test_other_dropout_masks_would_be_seen(tmp_path):
    """The twin: with another random state the gradients differ, so the equality above says something."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "model"))
    model = add_adapter(model, adapter_plan(linear_names(model), dropout=0.2), seed=1, base="base").train()
    plain, _ = gradients_and_calls(model)
    torch.manual_seed(4)
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    other = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert not all(torch.equal(other[name], plain[name]) for name in plain)


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_the_first_layers_alone(tmp_path, layers):
    """Each of them runs twice, the others once; no gradient changes."""
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "model", layers=3))
    model = add_adapter(model, adapter_plan(linear_names(model), "lora", dropout=0.2), seed=1, base="base").train()
    plain, _ = gradients_and_calls(model)
    enable_gradient_checkpointing(model, layers)
    assert checkpointed_layers(model) == layers
    runs = [0, 0, 0]
    for number in range(3):
        attention = causal_model(model).get_submodule(f"model.layers.{number}.self_attn")
        attention.register_forward_hook(lambda *_, number=number: runs.__setitem__(number, runs[number] + 1))
    again, _ = gradients_and_calls(model)
    assert runs == [2] * layers + [1] * (3 - layers)
    assert all(torch.equal(again[name], plain[name]) for name in plain)
