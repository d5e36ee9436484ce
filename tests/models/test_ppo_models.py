"""Who plays what in PPO: a part gives the same numbers on the shared trunk and on a model of its own, to the bit."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from helpers import zoo
from helpers.tiers import representatives
from helpers.zoo_adapters import a_batch, adapted, base_model, head_of, saved
from surefoot.models.forward import logits_at
from surefoot.models.ppo_models import PPOModels, Role, ScoringRole, last_positions
from surefoot.models.save import load_adapter_weights
from surefoot.models.saved_adapter import open_adapter, read_adapter
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.models.value_head import ScoredModel

FEW = (("llama3", "lora"), ("phi3", "dora"), ("gemma2", "lora"), ("gpt2", "dora"))  # one for each kind of layer
PLACES = torch.tensor([0, 3, 7, 12, 13])


def shared(folder, tmp_path, kind: str, *, reference: str | None = None, dropout: float = 0.0) -> PPOModels:
    critic = saved(adapted(folder, kind, 2), tmp_path / "critic")
    reward = saved(adapted(folder, kind, 3), tmp_path / "reward")
    model = adapted(folder, kind, 1, dropout=dropout)
    trunk = SharedBackbone(model)
    trunk.add_copy("critic", trainable=True)
    load_adapter_weights(model, critic, save_embedding=False, name="critic")
    trunk.add_saved("reward", read_adapter(reward), trainable=False)
    if reference:
        trunk.add_copy(reference, trainable=False)
    return PPOModels(
        actor=Role(model, "default"),
        critic=ScoringRole(ScoredModel(model, head_of(model, 4)), "critic"),
        reference=Role(model, reference),
        reward=ScoringRole(ScoredModel(model, head_of(model, 5)), "reward"),
        trunk=trunk,
    )


def separate(folder, tmp_path, kind: str) -> PPOModels:
    critic, reward = (open_adapter(base_model(folder), read_adapter(tmp_path / name)) for name in ("critic", "reward"))
    return PPOModels(
        actor=Role(adapted(folder, kind, 1)),
        critic=ScoringRole(ScoredModel(critic, head_of(critic, 4))),
        reference=Role(base_model(folder)),
        reward=ScoringRole(ScoredModel(reward, head_of(reward, 5))),
    )


def numbers(cast: PPOModels) -> dict[str, torch.Tensor]:
    batch = a_batch()
    with cast.inference():
        return {
            "actor": cast.actor_logits_at(batch, PLACES),
            "values": cast.values(batch),
            "reference": cast.reference_logits_at(batch, PLACES),
            "scores": cast.scores(batch),
        }


@pytest.mark.parametrize(("family", "kind"), representatives(product(zoo.ZOO, ["lora", "dora"]), *FEW))
def test_parts_on_one_trunk_equal_models_of_their_own(zoo_model, tmp_path, family, kind):
    folder = zoo_model(family)
    together = numbers(shared(folder, tmp_path, kind))
    alone = numbers(separate(folder, tmp_path, kind))
    assert all(torch.equal(together[name], alone[name]) for name in together)
    assert not torch.equal(together["actor"], together["reference"])  # twin: a part heard as another would be seen
    assert len(set(together["scores"].tolist())) == 3


def test_the_reference_can_be_a_frozen_adapter(folder, tmp_path):
    cast = shared(folder, tmp_path, "lora", reference="start")
    found = numbers(cast)
    assert torch.equal(found["actor"], found["reference"])
    for name in cast.actor_parameters:
        cast.get_parameter(name).data += 0.1
    later = numbers(cast)
    assert torch.equal(later["reference"], found["reference"])
    assert not torch.equal(later["actor"], found["actor"])


@pytest.mark.parametrize("make", [shared, separate])
def test_actor_and_critic_are_all_that_learns(folder, tmp_path, make):
    shared_cast = shared(folder, tmp_path, "lora")
    cast = shared_cast if make is shared else separate_full(folder)
    trains = {name for name, parameter in cast.named_parameters() if parameter.requires_grad}
    assert cast.actor_parameters | cast.critic_parameters == trains
    assert not cast.actor_parameters & cast.critic_parameters
    batch = a_batch()
    cast.train()
    (cast.actor_logits_at(batch, PLACES).square().sum() + cast.values(batch).square().sum()).backward()
    assert {name for name, parameter in cast.named_parameters() if parameter.grad is not None} == trains
    cast.zero_grad()
    cast.values(batch).sum().backward()
    touched = {name for name, parameter in cast.named_parameters() if parameter.grad is not None}
    assert touched == cast.critic_parameters
    assert any("v_head" in name or "critic_head" in name for name in touched)


def separate_full(folder) -> PPOModels:
    models = [base_model(folder) for _ in range(4)]
    return PPOModels(
        actor=Role(models[0]),
        critic=ScoringRole(ScoredModel(models[1], head_of(models[1], 4))),
        reference=Role(models[2]),
        reward=ScoringRole(ScoredModel(models[3], head_of(models[3], 5))),
        offload=True,
    )


def test_names_say_whose_parameters_they_are(folder, tmp_path):
    cast = separate_full(folder)
    assert {name.partition(".")[0] for name, _ in cast.named_parameters()} == {"actor", "critic"}
    together = shared(folder, tmp_path, "dora")
    assert {name.partition(".")[0] for name, _ in together.named_parameters()} == {"trunk", "critic_head"}
    assert all(".default." in name for name in together.actor_parameters)
    assert all(".critic." in name or name.startswith("critic_head.") for name in together.critic_parameters)


def test_frozen_parts_have_no_dropout_and_the_others_keep_theirs(folder, tmp_path):
    cast = shared(folder, tmp_path, "lora", dropout=0.5)
    batch = a_batch()
    cast.train()
    modes = [module.training for module in cast.modules()]
    first, second = (cast.scores(batch) for _ in range(2))
    assert torch.equal(first, second)
    assert not first.requires_grad
    assert not cast.reference_logits_at(batch, PLACES).requires_grad
    assert [module.training for module in cast.modules()] == modes
    assert not torch.equal(cast.actor_logits_at(batch, PLACES), cast.actor_logits_at(batch, PLACES))
    with cast.inference():
        assert torch.equal(cast.actor_logits_at(batch, PLACES), cast.actor_logits_at(batch, PLACES))
    with cast.actor_inference() as actor:
        assert torch.equal(logits_at(actor, batch, PLACES), logits_at(actor, batch, PLACES))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_score_is_the_value_at_the_last_real_token(folder, tmp_path, side):
    cast = shared(folder, tmp_path, "lora")
    batch = a_batch(side)
    assert last_positions(batch).tolist() == ([5, 5, 5] if side == "left" else [5, 2, 4])
    reward = cast._reward
    with cast.inference(), cast._adapter_of(reward):
        values = reward.model.values(batch)
    expected = [float(values[row, place]) for row, place in enumerate(last_positions(batch))]
    assert cast.scores(batch).tolist() == expected
    assert len(cast.scores(batch.blank())) == 3  # of a rank without answers, for the collectives of its pass


def test_offloaded_models_come_only_to_be_asked(folder, monkeypatch):
    moves = []
    cast = separate_full(folder)
    frozen = cast._reference.model
    monkeypatch.setattr(frozen, "to", lambda device: moves.append(str(device)))
    monkeypatch.setattr(frozen, "cpu", lambda: moves.append("home"))
    cast.reference_logits_at(a_batch(), PLACES)
    assert moves == ["cpu", "home"]
    moves.clear()
    with cast.on_device():
        cast.reference_logits_at(a_batch(), PLACES)
        cast.reference_logits_at(a_batch(), PLACES)
    assert moves == ["cpu", "home"]


def test_a_frozen_part_that_would_learn_is_refused(folder, tmp_path):
    model = adapted(folder, "lora", 1)
    trunk = SharedBackbone(model)
    trunk.add_copy("critic", trainable=True)
    critic = ScoringRole(ScoredModel(model, head_of(model, 4)), "critic")
    with pytest.raises(ValueError, match="critic"):
        PPOModels(actor=Role(model, "default"), critic=critic, reference=Role(model, "critic"), trunk=trunk)
    both = ScoringRole(critic.model, "default")
    with pytest.raises(ValueError, match="both train"):
        PPOModels(actor=Role(model, "default"), critic=both, reference=Role(model, None), trunk=trunk)
    whole = base_model(folder)
    with pytest.raises(ValueError, match="frozen"):
        PPOModels(actor=Role(whole), critic=ScoringRole(ScoredModel(whole, head_of(whole, 4))), reference=Role(whole))
