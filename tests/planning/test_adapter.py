"""Targets by full name, and counts, against what PEFT makes of the same request."""

from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from helpers.faults import gives
from helpers.model_layouts import LLAMA31_8B, model_facts, run_config
from surefoot.planning import adapter as module
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.notes import Notes

SMALL = LLAMA31_8B | {
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
}


@pytest.fixture
def decide(tmp_path):
    def decide(config=SMALL, added_rows=0, **request):
        notes = Notes()
        adapter = run_config(adapter={"kind": "lora", "rank": 4} | request).adapter
        return plan_adapter(adapter, model_facts(tmp_path, config), added_rows, notes), notes

    return decide


def by_peft(config, plan, added_rows=0):
    """(adapted modules, trainable parameters) of PEFT's model for this plan."""
    keys = {key: value for key, value in config.items() if key not in ("model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**keys))
    if added_rows:
        model.resize_token_embeddings(config["vocab_size"] + added_rows)
    tied = config["tie_word_embeddings"] and {"lm_head", "embed_tokens"} & set(plan.modules_to_save)
    lora = LoraConfig(
        r=plan.rank,
        target_modules=list(plan.targets.value),
        use_dora=plan.kind.value == "dora",
        modules_to_save=list(plan.modules_to_save) or None,
        ensure_weight_tying=bool(tied),
    )
    adapted = get_peft_model(model, lora)
    names = [name for name, part in adapted.get_base_model().named_modules() if hasattr(part, "lora_A")]
    return sorted(names), sum(parameter.numel() for parameter in adapted.parameters() if parameter.requires_grad)


TIED = SMALL | {"tie_word_embeddings": True}


def check_targets_and_count_are_pefts(decide, config, request_):
    plan, notes = decide(config, **request_)
    assert not notes.faults
    assert (sorted(plan.targets.value), plan.trainable) == by_peft(config, plan)


def test_targets_and_count_are_pefts(decide):
    for config, request_ in [
        (SMALL, {}),
        (SMALL, {"kind": "dora"}),
        (SMALL, {"rank": 7, "targets": ["q_proj", "v_proj"]}),
        (SMALL, {"targets": ["self_attn.o_proj", "model.layers.1.mlp.up_proj"], "kind": "dora"}),
        (SMALL, {"targets": ["lm_head", "q_proj"]}),
        (SMALL, {"modules_to_save": ["lm_head", "embed_tokens"]}),
        (SMALL, {"modules_to_save": ["norm"]}),
        (SMALL, {"targets": ["q_proj"], "modules_to_save": ["down_proj"]}),
        (TIED, {}),
        (TIED, {"modules_to_save": ["lm_head"]}),
        (TIED, {"modules_to_save": ["lm_head", "model.embed_tokens"]}),
        (SMALL | {"head_dim": 16, "attention_bias": True}, {"kind": "dora"}),
    ]:
        check_targets_and_count_are_pefts(decide, config, request_)


ROWS = 3


def check_added_rows_count_where_they_train(decide, config, request_):
    plan, notes = decide(config, ROWS, **request_)
    assert not notes.faults
    assert (sorted(plan.targets.value), plan.trainable) == by_peft(config, plan, ROWS)


def test_added_rows_count_where_they_train(decide):
    for config, request_ in [
        (SMALL, {}),
        (SMALL, {"modules_to_save": ["lm_head"]}),
        (SMALL, {"modules_to_save": ["lm_head", "embed_tokens"]}),
        (SMALL, {"modules_to_save": ["norm"]}),
        (SMALL, {"targets": ["lm_head", "q_proj"], "kind": "dora"}),
        (TIED, {"modules_to_save": ["lm_head"]}),
        (TIED, {"modules_to_save": ["embed_tokens"]}),
        (TIED, {"modules_to_save": ["lm_head", "embed_tokens"]}),
    ]:
        check_added_rows_count_where_they_train(decide, config, request_)


def test_a_rank_that_a_matrix_cannot_have_is_told(decide):
    (caution,) = decide(rank=5000)[1].cautions
    assert all(gives(caution, one) for one in ("adapter.rank", "5,000", 14, 32, 16)), caution  # of all; inputs, outputs
    assert "self_attn.k_proj" in caution
    (caution,) = decide(rank=16)[1].cautions
    assert all(gives(caution, one) for one in (16, 4, 14)), caution  # keys and values


def test_twin_a_rank_below_every_side_is_no_caution(decide):
    assert decide(rank=15)[1].cautions == []


def test_forgetting_the_added_rows_would_be_noticed(decide, monkeypatch):
    monkeypatch.setattr(module, "_with_rows", lambda model, rows: model)
    with pytest.raises(AssertionError):
        check_added_rows_count_where_they_train(decide, SMALL, {"modules_to_save": ["lm_head"]})


def test_forgetting_doras_magnitudes_would_be_noticed(decide, monkeypatch):
    monkeypatch.setattr(module, "_sizes", lambda target: (target.linear[0], 0))
    with pytest.raises(AssertionError):
        check_targets_and_count_are_pefts(decide, SMALL, {"kind": "dora"})


def test_names_are_full_and_without_the_head(decide):
    plan, _ = decide()
    assert "model.layers.0.self_attn.q_proj" in plan.targets.value
    assert len(plan.targets.value) == 14
    assert "lm_head" not in plan.targets.value


def test_all_faults_name_what_exists(decide):
    _, notes = decide(targets=["q_prj", "wq"], modules_to_save=["haed"])
    assert [(fault.code, fault.where) for fault in notes.faults] == [
        ("SF-ADAPTER-TARGETS", "adapter.targets"),
        ("SF-ADAPTER-TARGETS", "adapter.targets"),
        ("SF-ADAPTER-TARGETS", "adapter.modules_to_save"),
    ]
    assert gives(notes.faults[0].fix, "q_proj")
    assert gives(notes.faults[1].fix, "gate_proj")


def test_what_cannot_carry_an_adapter_is_refused(decide):
    for config, request_, key in [
        (SMALL, {"targets": ["embed_tokens"]}, "adapter.targets"),
        (SMALL, {"targets": ["norm"]}, "adapter.targets"),
        (SMALL, {"targets": ["proj"]}, "adapter.targets"),
        (TIED, {"targets": ["lm_head"]}, "adapter.targets"),
        (SMALL, {"modules_to_save": ["q_proj"]}, "adapter.modules_to_save"),
    ]:
        _, notes = decide(config, **request_)
        assert {fault.where for fault in notes.faults} == {key}


def test_published_count_of_llama_31_8b(decide):
    assert decide(LLAMA31_8B, rank=32)[0].trainable == 83_886_080


@pytest.fixture(autouse=True)
def _no_gradients_needed():
    with torch.no_grad():
        yield


OPT = {
    "model_type": "opt", "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 70, "word_embed_proj_dim": 16, "do_layer_norm_before": False, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.parametrize(("config", "place"), [(SMALL, "layers."), (SMALL, "model.layers."), (OPT, "decoder.layers.")])
def test_a_place_takes_every_linear_layer_that_lies_there(decide, config, place):
    plan, notes = decide(config, targets=[place])
    assert not notes.faults
    names = plan.targets.value
    assert len(names) == 2 * (7 if config is SMALL else 6)
    assert all(".layers." in name for name in names)  # neither the head nor OPT's project_in and project_out


@pytest.mark.parametrize(
    ("config", "place", "right"),
    [(SMALL, "decoder.layers.", "'model.layers.'"), (OPT, "model.layers.", "'decoder.layers.'"),
     (SMALL, "decoder.layers", "'model.layers.'")],
)  # fmt: skip
def test_a_place_of_another_family_is_refused_with_the_right_one(decide, config, place, right):
    _, notes = decide(config, targets=[place])
    (refusal,) = notes.faults
    assert right in str(refusal)


PATTERN = r"model\.layers\.[\d]+\.(mlp|self_attn)\.(up|q|k)_proj"


@pytest.mark.parametrize("pattern", [PATTERN, r".*_proj", r"model.layers.1.mlp.down_proj"])
def test_a_pattern_names_the_modules_that_peft_takes_it_for(decide, pattern):
    plan, notes = decide(SMALL, targets=[f"re:{pattern}"])
    keys = {key: value for key, value in SMALL.items() if key not in ("model_type", "torch_dtype")}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**keys))
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=pattern)).get_base_model()
    assert not notes.faults
    assert sorted(plan.targets.value) == sorted(
        name for name, part in adapted.named_modules() if hasattr(part, "lora_A")
    )


@pytest.mark.parametrize("pattern", ["q_proj", "layers", "(q|k)_proj"])  # PEFT takes a pattern for the whole name
def test_twin_a_pattern_of_a_part_of_the_name_is_refused(decide, pattern):
    _, notes = decide(SMALL, targets=[f"re:{pattern}"])
    assert {(fault.code, fault.where) for fault in notes.faults} == {("SF-ADAPTER-TARGETS", "adapter.targets")}


@pytest.mark.parametrize(("frozen", "named"), [(("o_proj", "up_proj"), ["o_proj", "up_proj"]), ((), [])])
def test_linear_layers_that_get_no_adapter_are_told(tmp_path, frozen, named):
    facts = model_facts(tmp_path, SMALL)
    assert facts.family is not None
    facts = replace(facts, family=replace(facts.family, without_adapter=frozen))
    request = run_config(adapter={"kind": "lora", "rank": 4}).adapter
    targets = plan_adapter(request, facts, 0, Notes()).targets
    assert len(targets.value) == 14 - 2 * len(frozen)
    assert [name for name in ("q_proj", "o_proj", "up_proj") if gives(targets.reason, name)] == named
