"""Which keys change with the model, by a table of cases; and what stays."""

from copy import deepcopy
from dataclasses import replace

import pytest

from helpers import zoo
from helpers.faults import gives
from surefoot.families import counterpart, find
from surefoot.families.model_facts import ModelFacts
from surefoot.models.facts import facts_of
from surefoot.planning import migration as module
from surefoot.planning.migration import migrate

OPT_SFT = {
    "stage": "sft",
    "model": {"path": "facebook/opt-1.3b"},
    "data": {"train": {"path": "train.json"}, "max_length": 512},
    "output": "runs/opt",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> ModelFacts:
    return facts_of(zoo.llama3(tmp_path_factory.mktemp("zoo") / "llama3"))


def big(facts: ModelFacts) -> ModelFacts:
    """As large as the models that the rates are meant for."""
    modules = (replace(facts.modules[0], parameters=8 * 10**9), *facts.modules[1:])
    return replace(facts, modules=modules)


def with_keys(**keys):
    """OPT_SFT with dotted keys set; double underscores stand for dots."""
    config = deepcopy(OPT_SFT)
    for key, value in keys.items():
        *groups, name = key.split("__")
        place = config
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = value
    return config


def moved(config, facts):
    return {move.key: move.new for move in migrate(config, "meta-llama/Llama-3.1-8B", facts).moves}


def test_what_moves(llama):
    for keys, expected in [
        ({"adapter__targets": ["q_proj", "v_proj"]}, {}),
        ({"adapter__targets": ["q_proj", "out_proj"]}, {"adapter.targets": ["q_proj", "o_proj"]}),
        ({"adapter__targets": ["fc1", "fc2"]}, {"adapter.targets": ["gate_proj", "up_proj", "down_proj"]}),
        ({"adapter__targets": ["model.decoder.layers.0.self_attn.out_proj"]}, {"adapter.targets": ["o_proj"]}),
        ({"adapter__targets": ["c_attn"]}, {"adapter.targets": ["q_proj"]}),
        ({"adapter__targets": "all-linear"}, {}),
        ({"adapter__modules_to_save": ["wte"]}, {"adapter.modules_to_save": ["embed_tokens"]}),
        ({"tokenizer__pad": "<pad>"}, {"tokenizer.pad": "auto"}),
        ({"tokenizer__pad": "add"}, {}),
        ({"reward__num_padding_at_beginning": 1}, {"reward.num_padding_at_beginning": "auto"}),
        ({"data__template": "phi3"}, {"data.template": "auto"}),
        ({"data__template": "llama3"}, {}),
        ({"data__template": "alpaca"}, {}),
        ({"data__max_length": 10**6}, {"data.max_length": 128}),
        ({"batch__micro": 4}, {"batch.micro": "auto"}),
        ({"model__revision": "main"}, {"model.revision": None}),
    ]:
        facts = replace(llama, max_positions=128) if "data__max_length" in keys else replace(llama, max_positions=2048)
        always = {"model.path": "meta-llama/Llama-3.1-8B", "output": "runs/opt-Llama-3.1-8B"}
        assert moved(with_keys(**keys), facts) == always | expected


def test_rates_of_all_weights_follow_the_guide(llama):
    rates = {
        "sft": {"optim.lr": 2e-5},
        "reward": {"optim.lr": 5e-6},
        "ppo": {"optim.lr": 5e-7, "ppo.critic_lr": 5e-6},
        "pretrain": {},
    }
    for stage, expected in rates.items():
        config = with_keys(stage=stage, optim__lr=9.65e-6, ppo__critic_lr=1e-5)
        found = moved(config, big(llama))
        assert {key: found[key] for key in found if key.endswith("lr")} == expected
        assert not any(key.endswith("lr") for key in moved(config, llama))  # a tiny model is no 8 B


def test_an_adapters_rate_stays_and_is_said(llama):
    found = migrate(with_keys(adapter__kind="lora", optim__lr=1e-3), "x", big(llama))
    assert "optim.lr" not in {move.key for move in found.moves}
    assert any(gives(note, "optim.lr") for note in found.notes)


def test_the_new_config_holds_the_moves_and_the_rest_as_it_was(llama):
    config = with_keys(adapter__targets=["out_proj"], model__revision="main", seed=7)
    before = deepcopy(config)
    found = migrate(config, "llama3", llama)
    assert config == before
    assert found.config["model"] == {"path": "llama3"}
    assert found.config["adapter"]["targets"] == ["o_proj"]
    assert (found.config["seed"], found.config["data"]) == (7, before["data"])


def test_models_of_the_old_family_are_named(llama):
    keys = {"stage": "ppo", "ppo__reward": "runs/opt-reward", "ppo__critic": "runs/opt-reward"}
    notes = migrate(with_keys(**keys), "x", llama).notes
    assert [[key for key in ("ppo.reward", "ppo.critic") if gives(note, key)] for note in notes] == [
        ["ppo.reward"],
        ["ppo.critic"],
    ]
    for reward in ("score.py:reward", "http://127.0.0.1:1/score"):
        assert not migrate(with_keys(stage="ppo", ppo__reward=reward), "x", llama).notes


def test_an_unknown_module_is_said_and_left_out(llama):
    found = migrate(with_keys(adapter__targets=["q_proj", "flux_capacitor"]), "x", llama)
    assert any("flux_capacitor" in note for note in found.notes)
    assert found.config["adapter"]["targets"] == ["q_proj"]


def test_twin_without_counterparts_the_old_names_would_be_unknown(llama, monkeypatch):
    monkeypatch.setattr(module, "counterpart", lambda name, family: None)
    found = migrate(with_keys(adapter__targets=["out_proj"]), "x", llama)
    assert any("no counterpart" in note for note in found.notes)


def test_counterparts_are_those_of_the_families():
    assert counterpart("out_proj", find("llama")) == "o_proj"
