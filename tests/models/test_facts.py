"""Families whose structure no row has: the module tree, against the model and PEFT; which of them are trained."""

import json
from importlib.util import find_spec

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from transformers import BertConfig, BertLMHeadModel, Gemma3nConfig

from helpers.architectures import LLAMA, TINY, build, window_of
from helpers.faults import raises_fault
from helpers.model_layouts import model_facts, run_config
from helpers.wrappers import WRAPPERS
from surefoot.config.schema import AttentionConfig
from surefoot.data.batching.batch import IGNORE, Example, collate
from surefoot.families import model_facts as of_config
from surefoot.methods.losses.sft import sft_loss
from surefoot.models import forward, verify
from surefoot.models.attention import observe_kernels
from surefoot.models.facts import facts_of, module_tree
from surefoot.models.forward import hidden_states, output_head
from surefoot.models.verify import verify_head
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.attention import plan_attention
from surefoot.planning.notes import Notes
from surefoot.system.errors import EnvironmentFault
from surefoot.system.hardware import preset

CPU = torch.device("cpu")
# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
SIZES = {key: value for key, value in LLAMA.items() if isinstance(value, int)} | {"pad_token_id": 0}
FALCON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 70}
UNKNOWN = {
    "granite": SIZES | {"logits_scaling": 8.0},
    "cohere": SIZES | {"logit_scale": 0.1},
    "stablelm": SIZES | {"use_qkv_bias": True},
    "falcon": FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neox": SIZES | {"attention_dropout": 0.1},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 70, "n_positions": 128, "rotary_dim": 4},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 70, "n_positions": 128},
    "starcoder2": SIZES | {"sliding_window": 16},
    "exaone4": SIZES | {"sliding_window": 16, "sliding_window_pattern": 2},
    "gemma": SIZES | {"head_dim": 8},
}


@pytest.fixture(params=UNKNOWN)
def config(request):
    return UNKNOWN[request.param] | {"model_type": request.param}


def facts(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return facts_of(folder)


@pytest.mark.parametrize("name", TINY)
def test_norms_of_a_layer_are_those_of_a_familys_row(tmp_path, name):
    row = model_facts(tmp_path, TINY[name])
    read = of_config.read_model_facts(tmp_path, module_tree(tmp_path))
    assert row.structure is not None
    assert read.structure is None
    assert sorted(read.norms) == sorted(row.norms)


def test_a_tree_is_built_once_for_each_config(tmp_path, config):
    first = facts(tmp_path, config)
    tree = module_tree(tmp_path)
    assert module_tree(tmp_path) is tree
    assert facts(tmp_path, config | {"vocab_size": 71}).vocab != first.vocab  # twin: another config
    assert module_tree(tmp_path) is not tree


def test_norms_of_a_wrapped_model_are_those_of_its_language_model(tmp_path, monkeypatch):
    text, eye, others = WRAPPERS["gemma3"]
    found = {"model_type": "gemma3", "text_config": text, "vision_config": eye, **others}
    expected = ["hidden"] * 4 + ["key_value", "query"]
    assert sorted(facts(tmp_path, found).norms) == expected
    monkeypatch.setattr(of_config, "_QK_NORMS", {})  # twin
    assert sorted(facts(tmp_path, found).norms) != expected


def test_names_and_counts_are_the_models(tmp_path, config):
    found, model = facts(tmp_path, config), build(config)
    model.tie_weights()
    assert found.structure is None, f"{config['model_type']} has a row with a structure: take it out of UNKNOWN"
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert found.tied == model.config.tie_word_embeddings
    names = dict(model.named_modules())
    assert names[found.embedding] is model.get_input_embeddings()
    assert names[found.head] is model.get_output_embeddings()
    assert bool(found.without_sdpa) != model._supports_sdpa
    assert found.layers == len([name for name in names if name.count(".") == 2 and name.split(".")[-1].isdigit()])


def test_all_linear_is_what_peft_means_by_it(tmp_path, config):
    notes = Notes()
    plan = plan_adapter(run_config(adapter={"kind": "lora", "rank": 4}).adapter, facts(tmp_path, config), 0, notes)
    theirs = get_peft_model(build(config, device="cpu"), LoraConfig(r=4, target_modules="all-linear"))
    names = [n for n, module in theirs.get_base_model().named_modules() if isinstance(module, LoraLayer)]
    assert not notes.faults
    assert sorted(plan.targets.value) == sorted(names)
    assert plan.trainable == sum(p.numel() for p in theirs.parameters() if p.requires_grad)


def test_the_loss_is_the_models_own(config, monkeypatch):
    """Granite divides its logits, Cohere scales them: what stands behind the head is the model's business."""
    model = build(config, device="cpu").eval()
    assert verify_head(model, CPU) <= FP32_RELATIVE
    ids = torch.arange(3, 23).numpy()
    batch = collate([Example(ids, ids > 9, 0)], pad_id=0)
    labels = torch.cat((torch.full((1, 1), IGNORE), batch.targets[:, :-1]), dim=1)
    expected = model(input_ids=batch.input_ids, labels=labels).loss.item()
    assert sft_loss(model, batch).loss.item() / batch.weight == pytest.approx(expected, rel=FP32_RELATIVE)
    if config["model_type"] in ("granite", "cohere"):  # twin: the head alone is something else
        head_alone = output_head(model)(hidden_states(model, batch))
        own = model(input_ids=batch.input_ids).logits
        assert (head_alone - own).abs().max() > 0.1 * own.abs().max()


def test_dropout_and_windows_are_seen(tmp_path):
    dropping = facts(tmp_path, UNKNOWN["gpt_bigcode"] | {"model_type": "gpt_bigcode"})
    assert dropping.attention_dropout == 0.1
    assert dropping.dropouts == (("resid_pdrop", 0.1), ("embd_pdrop", 0.1))
    assert facts(tmp_path, UNKNOWN["gpt_neox"] | {"model_type": "gpt_neox"}).attention_dropout == 0.1
    for kind in ("exaone4", "starcoder2", "phimoe"):  # the last two have no `layer_types`
        config = UNKNOWN.get(kind, SIZES | {"sliding_window": 16}) | {"model_type": kind}
        assert facts(tmp_path, config).window == window_of(build(config, device="cpu")) == 16
        without = config | {"sliding_window": None, "layer_types": ["full_attention"] * 3}
        assert facts(tmp_path, without).window is window_of(build(without, device="cpu")) is None  # twin


def test_a_window_in_the_full_layers_of_a_hybrid_is_seen(tmp_path):
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    config = SIZES | {"model_type": "minimax", "sliding_window": 4, "layer_types": kinds, "block_size": 8}
    assert facts(tmp_path, config).window == 4
    assert facts(tmp_path, config | {"sliding_window": None}).window is None  # twin
    model = build(config, device="cpu").eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        last = model(torch.arange(3, 15)[None], output_attentions=True, use_cache=False).attentions[1][0, :, -1]
    assert [bool(seen.all()) for seen in (last[:, -4:], last[:, :-4] == 0)] == [True, True]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        ({"model_type": "t5"}, ["t5"]),
        ({"model_type": "novel"}, ["novel"]),
    ],
)
def test_what_cannot_be_trained_here_is_refused(tmp_path, config, names):
    code, place = "SF-MODEL-KIND", tmp_path / "config.json"
    with raises_fault(code, place, names[0], also=[(code, place, name) for name in names[1:]]):
        facts(tmp_path, config)


def test_an_encoder_in_a_causal_class_is_found(monkeypatch):
    model = BertLMHeadModel(BertConfig(**SIZES | {"num_hidden_layers": 2}))
    with raises_fault("SF-MODEL-NUMBERS", "BertLMHeadModel"):
        verify_head(model, CPU)
    monkeypatch.setattr(verify, "_relative", lambda found, wanted: 0.0)  # twin
    assert verify_head(model, CPU) == 0.0
    assert forward.output_head(model) is model.get_output_embeddings()


# layers, and what they do along a row: softmax attention, and a state or a convolution
RECURRENT = {
    "mamba2": ({"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}, (False, True)),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, (True, True)),
    "qwen3_5_text": ({"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}, (True, True)),
    "kimi_linear": ({"layer_types": ["linear_attention"] * 2, "n_routed_experts": 2, "num_experts": 2}, (False, True)),
    "olmo2": ({}, (True, False)),
}


@pytest.mark.parametrize("kind", RECURRENT)
def test_what_layers_do_along_a_row(tmp_path, kind):
    keys, expected = RECURRENT[kind]
    found = facts(tmp_path, SIZES | {"num_hidden_layers": 2} | keys | {"model_type": kind})
    assert (found.attends, found.recurrent) == expected
    assert found.without_sdpa == "" if found.attends else found.without_sdpa


@pytest.mark.parametrize(
    ("keys", "odd", "kernel"),
    [
        ({"multi_query": True, "new_decoder_architecture": False}, "keys", "math"),  # Falcon 7B
        ({"num_kv_heads": 2, "new_decoder_architecture": True}, "", "flash"),  # 40B
    ],
)
def test_the_kernel_that_takes_one_head_of_keys_is_the_planned_one(tmp_path, keys, odd, kernel):
    """torch's own choice for these heads is what the plan expects, so that no run is stopped by it."""
    config = FALCON | {"alibi": False, "model_type": "falcon"} | keys
    found = facts(tmp_path, config)
    model = build(config, device="cpu").eval()
    tokens = torch.arange(1, 25).reshape(1, -1)
    assert found.odd_heads == odd
    notes = Notes()
    plan = plan_attention(
        AttentionConfig(), hardware=preset("cpu"), compute="fp32", head_dim=found.head_dim,
        dropout=0.0, trials=(), notes=notes, odd_heads=found.odd_heads,
    )  # fmt: skip
    assert plan.expected.value == kernel
    assert observe_kernels(lambda: model(tokens)) == {kernel}


@pytest.mark.skipif(find_spec("timm") is not None, reason="with timm it opens")
def test_a_package_that_a_part_of_the_model_comes_from_is_named(tmp_path):
    Gemma3nConfig().save_pretrained(tmp_path)
    with raises_fault("SF-MODEL-KIND", tmp_path / "config.json", "timm", remedy=["timm"]) as caught:
        facts_of(tmp_path)
    assert isinstance(caught.value, EnvironmentFault)


def test_infinity_as_transformers_writes_it(tmp_path):
    limit = {"__float__": "Infinity"}
    keys = {"model_type": "mamba2", "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1}
    found = facts(tmp_path, SIZES | keys | {"time_step_limit": [0.0, limit]})
    assert found.parameters > 0
    with raises_fault("SF-MODEL-KIND", tmp_path / "config.json"):
        facts(tmp_path, SIZES | keys | {"hidden_size": limit})
