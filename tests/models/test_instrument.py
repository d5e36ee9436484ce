"""What the instruments see is what transformers reports, for every family, and they leave no trace."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.adapter_runs import CPU, a_run
from helpers.faults import raises_fault
from surefoot.families.model_facts import read_model_facts
from surefoot.methods.requests import chosen_layers
from surefoot.models.facts import facts_of, module_tree
from surefoot.models.forward import causal_model, narrowed_logits
from surefoot.models.instrument import by_token, layer_parts, watched
from surefoot.models.load import load_model
from surefoot.models.saved_adapter import open_adapter, read_adapter

IDS = torch.tensor([[5, 9, 33, 7, 12, 8, 40]])
TOKENS = IDS.shape[1]
LAST = torch.tensor([TOKENS - 1])


def loaded(folder, attention="eager"):
    return load_model(folder, dtype=torch.float32, attention_implementation=attention, device=CPU, vocab_rows=None)


def seen_in(model, facts, layers=(0, 1), attention=False, ids=IDS):
    """{(module, kind): tensor} of one forward pass."""
    found = {}

    def see(place, tensor):
        found[place.module, place.kind] = tensor.clone()

    with torch.no_grad(), watched(model, layer_parts(model, facts), layers, see, attention=attention):
        narrowed_logits(model, LAST, input_ids=ids, use_cache=False)
    return found


@pytest.mark.parametrize("name", zoo.ZOO)
def test_the_stream_norms_projections_and_maps_are_transformers_own(zoo_model, name):
    model, facts = loaded(zoo_model(name)), facts_of(zoo_model(name))
    found = seen_in(model, facts, attention=True)
    reference = AutoModelForCausalLM.from_pretrained(zoo_model(name), attn_implementation="eager").eval()
    with torch.no_grad():
        out = reference(IDS, output_hidden_states=True, output_attentions=True, use_cache=False)
    layers = facts.structure.layers
    for number in range(2):
        assert torch.equal(found[f"{layers}.{number}", "residual_in"], out.hidden_states[number])
        (maps,) = [
            tensor for (module, kind), tensor in found.items() if kind == "attention" and f".{number}." in module
        ]
        assert torch.equal(maps, out.attentions[number])
    final = facts.structure.final_norm.path
    assert torch.equal(found[final, "output"], out.hidden_states[2 if facts.layers == 2 else -1]) or facts.layers > 2
    for row in (*facts.structure.linears, *facts.structure.layer_norms):
        module = reference.get_submodule(f"{layers}.1.{row.path}")
        given = found[f"{layers}.1.{row.path}", "input"]
        with torch.no_grad():
            assert torch.equal(found[f"{layers}.1.{row.path}", "output"], module(given))


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_the_parts_of_a_fused_matrix_are_named_and_sized(zoo_model, name):
    facts = facts_of(zoo_model(name))
    parts = layer_parts(loaded(zoo_model(name)), facts)
    fused = next(part for part in parts.parts if len(part.roles) == 3)
    assert fused.roles == ("q", "k", "v")
    assert sum(fused.sizes) == facts.head_dim * (facts.heads + 2 * facts.kv_heads)


def test_no_trace_stays_and_the_numbers_are_the_same(zoo_model):
    model, facts = loaded(zoo_model("llama3"), "sdpa"), facts_of(zoo_model("llama3"))
    before = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
    }
    config = copy.deepcopy(model.config.to_dict())
    with torch.no_grad():
        plain = model(IDS).logits
        with watched(model, layer_parts(model, facts), [0, 1], lambda place, tensor: None):
            instrumented = model(IDS).logits
    seen_in(model, facts, attention=True)
    assert torch.equal(plain, instrumented)
    after = {
        name: len(module._forward_hooks) + len(module._forward_pre_hooks) for name, module in model.named_modules()
    }
    assert after == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == "sdpa"
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain)


def test_twin_an_instrument_that_writes_changes_the_numbers(zoo_model):
    model, facts = loaded(zoo_model("llama3")), facts_of(zoo_model("llama3"))
    with torch.no_grad():
        plain = model(IDS).logits
        with watched(model, layer_parts(model, facts), [0], lambda place, tensor: tensor.mul_(1.01)):
            assert not torch.equal(model(IDS).logits, plain)


def test_hooks_are_gone_after_a_failure_too(zoo_model):
    model, facts = loaded(zoo_model("llama3")), facts_of(zoo_model("llama3"))

    def fail(place, tensor):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError), watched(model, layer_parts(model, facts), [0], fail, attention=True):
        model(IDS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_layers_that_give_no_maps_are_refused(zoo_model, monkeypatch):
    model, facts = loaded(zoo_model("llama3"), "sdpa"), facts_of(zoo_model("llama3"))
    monkeypatch.setattr(type(model), "set_attn_implementation", lambda self, name: None)
    with raises_fault("SF-MODEL-KIND", "attention maps"):
        seen_in(model, facts, attention=True)


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_a_family_without_a_row_shows_its_tree(zoo_model, name):
    facts = read_model_facts(zoo_model(name))
    described = {part.path for part in layer_parts(loaded(zoo_model(name)), facts).parts}
    unknown = type(facts)(**{**vars(facts), "family": None})
    parts = layer_parts(loaded(zoo_model(name)), unknown)
    assert {part.path for part in parts.parts} == described
    assert parts.final_norm.path == facts.structure.final_norm.path
    assert module_tree(zoo_model(name))


def test_the_modules_of_an_adapted_model_are_called_as_in_the_base(zoo_model, tmp_path):
    run = a_run(tmp_path / "run", zoo_model("phi3"))
    model = open_adapter(loaded(zoo_model("phi3")), read_adapter(run))
    facts = facts_of(zoo_model("phi3"))
    assert seen_in(model, facts).keys() == seen_in(loaded(zoo_model("phi3")), facts).keys()
    unknown = type(facts)(**{**vars(facts), "family": None})
    paths = [part.path for part in layer_parts(model, unknown).parts]
    assert sorted(paths) == sorted(
        part.path for part in layer_parts(causal_model(loaded(zoo_model("phi3"))), facts).parts
    )


def test_tokens_are_found_by_the_memory_where_the_sizes_are_equal():
    rows = torch.arange(4 * 4 * 3.0).reshape(1, 4, 4, 3)  # tokens, heads, width
    assert torch.equal(by_token(rows, 1, 4), rows.flatten(2))
    assert torch.equal(by_token(rows.transpose(1, 2), 1, 4), rows.flatten(2))
    assert torch.equal(by_token(rows.flatten(0, 1).flatten(1), 1, 4), rows.flatten(2))  # as OPT's MLP once had it
    with pytest.raises(ValueError, match="no axis"):
        by_token(rows, 1, 5)


@pytest.mark.parametrize(
    ("spec", "layers"), {"all": list(range(8)), "0,5-7": [0, 5, 6, 7], " 3 ": [3], "2,1,1-2": [1, 2]}.items()
)
def test_layers_by_number_and_range(spec, layers):
    assert list(chosen_layers(spec, 8)) == layers


@pytest.mark.parametrize("spec", ["", "x", "3-", "-1", "5-3", "8", "0-8", "1;2"])
def test_layers_that_make_no_sense(spec):
    with pytest.raises(ValueError):
        chosen_layers(spec, 8)
