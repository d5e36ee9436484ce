"""Facts from config.json against the models that transformers builds from the same file."""

import dataclasses
import json

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from helpers.architectures import (
    GEMMA2,
    GEMMA3,
    GPT2,
    LLAMA,
    MISTRAL,
    OPT,
    PHI3,
    PUBLISHED,
    QWEN2,
    QWEN3,
    TINY,
    build,
    window_of,
)
from helpers.faults import raises_fault
from helpers.model_layouts import LLAMA2_7B, LLAMA31_8B, LLAMA32_1B, model_facts
from surefoot.families import FAMILIES, find
from surefoot.families import model_facts as module
from surefoot.families.model_facts import read_model_facts
from surefoot.system.errors import InputError

SMALL = LLAMA
# What `Structure.keys` may rename, and what a linear layer may be.
KEYS = {
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"),
    *("attention_dropout", "hidden_act"),
}
ROLES = {"q", "k", "v", "o", "gate", "up", "down", "in", "out"}
DESCRIBED = [family for family in FAMILIES if family.structure]  # the others are read from the model itself
VARIANTS = {
    **TINY,
    "llama tied": LLAMA | {"tie_word_embeddings": True},
    "llama biased": LLAMA | {"attention_bias": True, "mlp_bias": True},
    "llama wide heads": LLAMA | {"head_dim": 16},
    "llama no groups": LLAMA | {"num_key_value_heads": 4},
    "qwen2 tied": QWEN2 | {"tie_word_embeddings": True},
    "qwen3 biased": QWEN3 | {"attention_bias": True},
    "phi3 no groups": PHI3 | {"num_key_value_heads": None},
    "gemma2 biased": GEMMA2 | {"attention_bias": True, "tie_word_embeddings": False},
    "opt projected, norm after": OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "opt without biases": OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False},
    "opt old": OPT | {"_remove_final_layer_norm": True, "tie_word_embeddings": False},
    "gpt2 inner": GPT2 | {"n_inner": 48, "tie_word_embeddings": False},
}


def sizes(found):
    if isinstance(found, Conv1D):
        return found.nx, found.nf
    return (found.in_features, found.out_features) if isinstance(found, nn.Linear) else None


def test_every_family_is_compared_with_its_model():
    """A row whose norms or projections are wrong shows only where a model of the family is built."""
    compared = {config["model_type"] for config in TINY.values()}
    assert [one.name for one in FAMILIES if one.structure and not compared & set(one.model_types)] == []


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_modules_are_those_of_the_model(tmp_path, config):
    facts, model = model_facts(tmp_path, config), build(config)
    model.tie_weights()
    assert facts.parameters == sum(parameter.numel() for parameter in model.parameters())
    modules = dict(model.named_modules())
    for fact in facts.modules:
        found = modules[fact.name]
        assert fact.parameters == sum(parameter.numel() for parameter in found.parameters()), fact.name
        assert fact.linear == sizes(found), fact.name
    holders = {name for name, found in modules.items() if next(found.parameters(recurse=False), None) is not None}
    assert holders | {facts.head} == {fact.name for fact in facts.modules}
    assert (model.get_input_embeddings(), model.get_output_embeddings()) == (
        modules[facts.embedding],
        modules["lm_head"],
    )
    assert facts.tied == model.config.tie_word_embeddings


@pytest.mark.parametrize("name", TINY)
def test_transposed_weights_are_those_of_conv1d(name):
    structure, model = find(TINY[name]["model_type"]).structure, build(TINY[name])
    for linear in structure.linears:
        found = model.get_submodule(f"{structure.layers}.0.{linear.path}")
        assert linear.transposed == isinstance(found, Conv1D)


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("field", ["layer_norms", "linears"])
def test_a_row_without_one_of_its_parts_is_noticed(tmp_path, monkeypatch, name, field):
    family = find(TINY[name]["model_type"])
    less = dataclasses.replace(family.structure, **{field: getattr(family.structure, field)[:-1]})
    broken = dataclasses.replace(family, structure=less)
    monkeypatch.setattr(module, "find", lambda model_type: broken)
    with pytest.raises(AssertionError):
        test_modules_are_those_of_the_model(tmp_path, TINY[name])


@pytest.mark.parametrize("family", DESCRIBED, ids=lambda family: family.name)
def test_what_a_missing_key_means_is_what_transformers_takes(family):
    """And every key that the row reads has a meaning when it is missing, but for sizes."""
    config = CONFIG_MAPPING[family.model_types[0]]()
    plain = config.to_dict() | {"sliding_window": type(config).__dict__.get("sliding_window")}
    structure = family.structure
    for key, value in structure.defaults.items():
        assert plain[key] == value, key
    keys = {key.name for norm in (*structure.layer_norms, structure.final_norm) for key in norm.when}
    keys |= {linear.bias.name for linear in structure.linears if not isinstance(linear.bias, bool)}
    keys |= {refusal.key.name for refusal in family.refusals} | set(family.dropouts)
    if family.window:
        keys |= {key.name for key in family.window.when} | {"sliding_window"}
        keys |= {family.window.from_layer} - {None}
    assert keys <= structure.defaults.keys()


@pytest.mark.parametrize("family", DESCRIBED, ids=lambda family: family.name)
def test_the_words_of_a_row_are_those_that_are_read(family):
    assert unread_words(family) == []
    structure = family.structure
    linear = dataclasses.replace(structure.linears[0], role="querry")
    for changes, word in [
        ({"keys": {**structure.keys, "hiden_act": "model_type"}}, "hiden_act"),
        ({"keys": {**structure.keys, "hidden_act": "hidden_activatoin"}}, "hidden_activatoin"),
        ({"linears": (linear, *structure.linears[1:])}, "querry"),
    ]:
        broken = dataclasses.replace(family, structure=dataclasses.replace(structure, **changes))
        assert unread_words(broken) == [word]  # twin


def unread_words(family) -> list[str]:
    """Keys that are not Llama's, names that transformers' config lacks, and roles that nobody asks for."""
    structure, config = family.structure, CONFIG_MAPPING[family.model_types[0]]().to_dict()
    linears = (*structure.linears, *structure.projections)
    return [
        *(key for key in structure.keys if key not in KEYS),
        *(name for name in structure.keys.values() if name not in config),
        *(role for linear in linears for role in linear.roles if role not in ROLES),
    ]


@pytest.mark.parametrize("name", TINY)
def test_a_config_written_by_transformers_gives_the_same_facts(tmp_path, name):
    build(TINY[name]).config.save_pretrained(tmp_path / "saved")
    saved, given = read_model_facts(tmp_path / "saved"), model_facts(tmp_path, TINY[name] | {"torch_dtype": "float32"})
    assert saved == given


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (MISTRAL, 16),
        (MISTRAL | {"sliding_window": None}, None),
        (LLAMA, None),
        (LLAMA | {"sliding_window": 16}, None),
        (QWEN2 | {"sliding_window": 16, "max_window_layers": 1}, None),
        (QWEN2 | {"sliding_window": 16, "max_window_layers": 1, "use_sliding_window": True}, 16),
        (QWEN2 | {"sliding_window": 16, "max_window_layers": 0, "use_sliding_window": True}, 16),
        (QWEN2 | {"sliding_window": 16, "max_window_layers": 3, "use_sliding_window": True}, None),
        (PHI3, 16),
        (PHI3 | {"sliding_window": None}, None),
        (GEMMA2, 16),
        (GEMMA3, 16),
        (GEMMA3 | {"layer_types": ["full_attention"] * 3}, None),
        (OPT, None),
        (GPT2, None),
    ],
)
def test_the_window_is_the_one_that_layers_use(tmp_path, config, window):
    assert model_facts(tmp_path, config).window == window
    assert window_of(build(config, device="cpu")) == window


@pytest.mark.parametrize("name", TINY)
def test_windows_and_dropouts_of_a_row_are_the_models(tmp_path, name):
    """Every share of dropout that the class's config has is turned on alone; the row names those that do something."""
    config = TINY[name]
    assert model_facts(tmp_path, config).window == window_of(build(config, device="cpu"))
    assert unlike_model(tmp_path, config) == []


def test_twin_a_row_that_leaves_out_window_or_dropout_is_noticed(tmp_path, monkeypatch):
    for config, change in ((MISTRAL, {"window": None}), (PHI3, {"dropouts": ()})):
        broken = dataclasses.replace(find(config["model_type"]), **change)
        with monkeypatch.context() as patched:
            patched.setattr(module, "find", lambda model_type, broken=broken: broken)
            seen = model_facts(tmp_path, config).window == window_of(build(config, device="cpu"))
            assert not seen or unlike_model(tmp_path, config)


def unlike_model(folder, config) -> list[str]:
    """Keys of dropout that change what the built model computes in training and not what the row says, or the other
    way round."""
    keys = CONFIG_MAPPING[config["model_type"]]().to_dict()
    shares = [key for key, value in keys.items() if "drop" in key and isinstance(value, float)]
    found, ids = [], torch.arange(3, 23)[None]
    for key in shares:
        alone = config | dict.fromkeys(shares, 0.0) | {key: 0.9}
        facts, model = model_facts(folder, alone), build(alone, device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            on, off = (model.train(mode)(input_ids=ids, use_cache=False).logits for mode in (True, False))
        if torch.equal(on, off) == bool(facts.dropouts or facts.attention_dropout):
            found.append(key)
    return found


def test_dropout_that_config_json_leaves_out_is_on(tmp_path):
    assert model_facts(tmp_path / "a", GPT2).dropouts == (("resid_pdrop", 0.1), ("embd_pdrop", 0.1))
    assert model_facts(tmp_path / "a", GPT2).attention_dropout == 0.1
    assert model_facts(tmp_path / "b", OPT).dropouts == (("dropout", 0.1),)
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0, "attn_pdrop": 0.0}
    facts = model_facts(tmp_path / "c", GPT2 | off)
    assert facts.dropouts == ()
    assert facts.attention_dropout == 0
    assert model_facts(tmp_path / "d", LLAMA).dropouts == ()


def test_only_models_that_refuse_sdpa_are_planned_without(tmp_path):
    for name, config in TINY.items():
        facts, model = model_facts(tmp_path / name, config), build(config)
        assert bool(facts.without_sdpa) != model._supports_sdpa


@pytest.mark.parametrize(
    ("config", "key"),
    [(GEMMA3, "use_bidirectional_attention"), (GPT2, "add_cross_attention")],
)
def test_a_variant_that_is_no_causal_model_is_refused(tmp_path, config, key):
    with raises_fault("SF-MODEL-KIND", tmp_path / "config.json", key):
        model_facts(tmp_path, config | {key: True})


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_of_every_family(tmp_path, name):
    config, parameters = PUBLISHED[name]
    assert model_facts(tmp_path, config).parameters == parameters
    model = build(config)
    model.tie_weights()
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize(
    ("config", "parameters"),
    [(LLAMA31_8B, 8_030_261_248), (LLAMA32_1B, 1_235_814_400), (LLAMA2_7B, 6_738_415_616)],
    ids=["Llama-3.1-8B", "Llama-3.2-1B", "Llama-2-7b"],
)
def test_published_sizes(tmp_path, config, parameters):
    facts = model_facts(tmp_path, config)
    assert facts.parameters == parameters
    assert len(facts.layer_linears) == 7 * facts.layers


def test_old_and_new_name_of_the_stored_type(tmp_path):
    without = {key: value for key, value in LLAMA31_8B.items() if key != "torch_dtype"}
    assert model_facts(tmp_path / "a", LLAMA31_8B).stored == "bf16"
    assert model_facts(tmp_path / "b", without | {"dtype": "float16"}).stored == "fp16"
    assert model_facts(tmp_path / "c", without).stored == "fp32"


def test_every_fault_of_a_config_is_reported_at_once(tmp_path):
    bad = SMALL | {"hidden_size": 0, "vocab_size": "70", "torch_dtype": "int4", "attention_dropout": 1.5}
    del bad["num_hidden_layers"]
    with pytest.raises(InputError) as caught:
        model_facts(tmp_path, bad)
    text = str(caught.value)
    assert len(caught.value.faults) == 5
    for key in ("hidden_size", "vocab_size", "dtype", "attention_dropout", "num_hidden_layers"):
        assert key in text
    assert all(fault.where == str(tmp_path / "config.json") for fault in caught.value.faults)


def test_a_file_that_is_no_json_is_named_with_its_line(tmp_path):
    (tmp_path / "config.json").write_text('{\n  "model_type": "llama",\n  oops\n}')
    with pytest.raises(InputError) as caught:
        read_model_facts(tmp_path)
    assert caught.value.faults[0].where == f"{tmp_path / 'config.json'}:3:3"


def test_families_are_found_by_model_type_and_named_once():
    assert [find(family.model_types[0]) for family in FAMILIES] == list(FAMILIES)
    assert find("stablelm") is None, "it has a row now: take another model_type without one here, and in the test below"
    types = [name for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types))


def test_an_unknown_family_without_its_tree_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "stablelm"}))
    with raises_fault("SF-MODEL-KIND", f"{tmp_path}/config.json"):
        read_model_facts(tmp_path)


def test_a_share_of_ones_own_replaces_that_of_the_config(tmp_path):
    from surefoot.families.model_facts import with_dropout

    facts = model_facts(tmp_path, OPT)
    assert with_dropout(facts, None) is facts
    without = with_dropout(facts, 0.0)
    assert (without.dropouts, without.attention_dropout) == ((), 0.0)
    assert with_dropout(facts, 0.2).dropouts == (("dropout", 0.2),)
