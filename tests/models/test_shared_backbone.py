"""Several adapters on one trunk: each plays as it does on a model of its own, and switching touches nothing else."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch

from helpers import zoo
from helpers.faults import raises_fault
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from helpers.zoo_adapters import a_batch, adapted, base_model, saved, stir
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.facts import facts_of
from surefoot.models.forward import hidden_states, logits_at
from surefoot.models.peft import LoraLayer
from surefoot.models.save import load_adapter_weights, save_adapter
from surefoot.models.saved_adapter import fitted, open_adapter, read_adapter
from surefoot.models.shared_backbone import SharedBackbone

FEW = (("llama3", "dora"), ("phi3", "lora"), ("gemma2", "dora"), ("gpt2", "lora"))  # one for each kind of layer
EVERYWHERE = torch.arange(18)


@torch.no_grad()
def logits(model, batch=None):
    model.eval()
    return logits_at(model, batch or a_batch(), EVERYWHERE)


def state_of(model):
    """Everything that switching could touch but must not."""
    return (
        [(name, parameter.requires_grad) for name, parameter in model.named_parameters()],
        [(name, module.training) for name, module in model.named_modules()],
        [(module._active_adapter, module._disable_adapters) for module in model.modules() if _switched(module)],
    )


def _switched(module):
    return hasattr(module, "_disable_adapters")


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ("lm_head", "embed_tokens")}])
def test_a_copy_starts_as_its_original_and_then_goes_its_own_way(folder, kind, options):
    model = adapted(folder, kind, 1, **options)
    before = state_of(model)
    trunk = SharedBackbone(model)
    actor, base = logits(model), logits(base_model(folder))
    model.train()
    trunk.add_copy("critic", trainable=True)
    assert set(before[0]) <= set(state_of(model)[0])
    with trunk.use_adapter("critic"):
        assert torch.equal(logits(model), actor)
    own = trunk.parameters_of("critic")
    assert own
    assert not own & trunk.parameters_of("default")
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == own | (
        trunk.parameters_of("default")
    )
    stir([model.get_parameter(name) for name in sorted(own)], 4)
    assert torch.equal(logits(model), actor)
    with trunk.use_adapter("critic"):
        assert not torch.equal(logits(model), actor)
        with trunk.use_adapter(None):
            assert torch.equal(logits(model), base)
            with trunk.use_adapter("default"):
                assert torch.equal(logits(model), actor)
            assert torch.equal(logits(model), base)
    assert torch.equal(logits(model), actor)


def test_a_tied_pair_that_trains_in_full_stays_tied_in_the_copy(tmp_path):
    model = adapted(tiny_llama(tmp_path, tied=True), "lora", 1, modules_to_save=("lm_head",))
    trunk = SharedBackbone(model)
    trunk.add_copy("critic", trainable=True)
    pair = [name for name, _ in model.named_parameters(remove_duplicate=False) if "modules_to_save.critic" in name]
    assert len(pair) == 2
    assert model.get_parameter(pair[0]) is model.get_parameter(pair[1])
    assert len({name for name in trunk.parameters_of("critic") if "modules_to_save" in name}) == 1


def fail_while_playing(trunk):
    with trunk.use_adapter(None), trunk.use_adapter("reference"):
        raise RuntimeError("mine")


def test_switching_leaves_gradients_modes_and_errors_alone(folder):
    model = adapted(folder, "dora", 1, dropout=0.3)
    trunk = SharedBackbone(model)
    trunk.add_copy("reference", trainable=False)
    model.train()
    before = state_of(model)
    with trunk.use_adapter(None), trunk.use_adapter("reference"):
        assert state_of(model)[:2] == before[:2]
    assert state_of(model) == before
    with pytest.raises(RuntimeError, match="mine"):
        fail_while_playing(trunk)
    assert state_of(model) == before
    assert trunk.active == "default"
    with pytest.raises(KeyError, match="criticc"), trunk.use_adapter("criticc"):
        pass
    assert state_of(model) == before
    with model.disable_adapter():  # twin: PEFT's own switch is seen by this test
        pass
    model.set_adapter("reference")
    assert state_of(model) != before


@pytest.mark.parametrize(("family", "kind"), representatives(product(zoo.ZOO, ["lora", "dora"]), *FEW))
def test_a_saved_adapter_plays_as_on_a_model_of_its_own(zoo_model, tmp_path, family, kind):
    """Also where it sits on other layers than the trunk's first one, and is of the other kind."""
    folder = zoo_model(family)
    other = adapted(folder, "lora" if kind == "dora" else "dora", 2, targets=".1.")
    path = saved(other, tmp_path / "other")
    model = adapted(folder, kind, 1, targets=".0.")
    actor = logits(model)
    trunk = SharedBackbone(model)
    trunk.add_saved("reward", fitted(read_adapter(path), facts_of(folder)), trainable=False)
    assert torch.equal(logits(model), actor)
    with trunk.use_adapter("reward"):
        assert torch.equal(logits(model), logits(open_adapter(base_model(folder), read_adapter(path))))
    with trunk.use_adapter(None):
        assert torch.equal(logits(model), logits(base_model(folder)))
    assert not any(model.get_parameter(name).requires_grad for name in trunk.parameters_of("reward"))


def test_each_adapter_is_saved_and_loaded_by_its_name(folder, tmp_path):
    model = adapted(folder, "dora", 1)
    trunk = SharedBackbone(model)
    trunk.add_copy("critic", trainable=True)
    stir([model.get_parameter(name) for name in sorted(trunk.parameters_of("critic"))], 4)
    save_adapter(model, tmp_path / "critic", save_embedding=False, name="critic")
    alone = open_adapter(base_model(folder), read_adapter(tmp_path / "critic"))
    with trunk.use_adapter("critic"):
        assert torch.equal(logits(model), logits(alone))
    actor = logits(model)
    stir([model.get_parameter(name) for name in sorted(trunk.parameters_of("critic"))], 5)
    load_adapter_weights(model, tmp_path / "critic", save_embedding=False, name="critic")
    assert torch.equal(logits(model), actor)
    with trunk.use_adapter("critic"):
        assert torch.equal(logits(model), logits(alone))


def test_an_adapter_of_another_model_is_refused(folder, tmp_path):
    path = saved(adapted(tiny_llama(tmp_path / "wider", hidden=64), "lora", 1), tmp_path / "adapter")
    trunk = SharedBackbone(adapted(folder, "lora", 1))
    with raises_fault("SF-ADAPTER-FIT", f"{path}/adapter_model.safetensors"):
        trunk.add_saved("reward", read_adapter(path), trainable=False)


def gradients_of_both(folder, *, checkpointed: bool):
    """Two parts of one trunk in one loss, so that the backward pass runs while another part plays."""
    model = adapted(folder, "lora", 1, dropout=0.2)
    if checkpointed:
        enable_gradient_checkpointing(model)
    trunk = SharedBackbone(model)
    trunk.add_copy("critic", trainable=True)
    stir([model.get_parameter(name) for name in sorted(trunk.parameters_of("critic"))], 4)
    model.train()
    torch.manual_seed(3)
    loss = logits_at(model, a_batch(), EVERYWHERE).square().mean()
    with trunk.use_adapter("critic"):
        loss = loss + hidden_states(model, a_batch()).square().mean()
    with trunk.use_adapter("default"):
        loss.backward(retain_graph=True)
        loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_layers_are_computed_again_by_the_part_that_ran_them(folder, monkeypatch):
    plain = gradients_of_both(folder, checkpointed=False)
    again = gradients_of_both(folder, checkpointed=True)
    assert plain.keys() == again.keys()
    assert all(torch.equal(again[name], plain[name]) for name in plain)
    # Twin: without its context, a layer is computed again by whatever plays during the backward pass.
    monkeypatch.setattr("surefoot.models.shared_backbone._AdapterAgain", lambda trunk, adapter: nullcontext())
    wrong = gradients_of_both(folder, checkpointed=True)
    assert not all(name in wrong and torch.equal(wrong[name], plain[name]) for name in plain)


def test_under_autocast_only_dora_keeps_its_casts(folder, tmp_path):
    path = saved(adapted(folder, "dora", 2, targets="q_proj"), tmp_path / "dora")
    model = adapted(folder, "lora", 1)
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
    SharedBackbone(model).add_saved("reward", read_adapter(path), trainable=False)
    kept = {
        name: module.cast_input_dtype_enabled for name, module in model.named_modules() if isinstance(module, LoraLayer)
    }
    assert all(flag == name.endswith("q_proj") for name, flag in kept.items())
