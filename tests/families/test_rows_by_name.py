"""Rows without a structure: their tokens in tokenizers laid out as published, and what is planned with them."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from helpers import zoo_tokenizers
from helpers.model_layouts import SMALL_TREE, run_config
from helpers.tiers import representatives
from helpers.zoo_modern import MODERN, RECURRENT
from surefoot.families import FAMILIES, find
from surefoot.families.model_facts import ModelFacts, read_model_facts
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.models.adapters import add_adapter
from surefoot.models.facts import facts_of
from surefoot.models.fast.chunked_head import head_obstacle
from surefoot.planning.adapter import plan_adapter, with_rest
from surefoot.planning.notes import Notes
from surefoot.planning.tokenizer import plan_tokenizer

LAYOUTS = {
    "gemma": (zoo_tokenizers.gemma, {"image": False}),
    "mixtral": (zoo_tokenizers.mistral, {"control": False}),
    "qwen3_moe": (zoo_tokenizers.qwen, {"thinks": True}),
    "qwen3_5_text": (zoo_tokenizers.qwen, {"thinks": True}),
    "gpt_oss": (zoo_tokenizers.gpt_oss, {}),
    "glm4_moe": (zoo_tokenizers.glm4, {}),
    "deepseek_v3": (zoo_tokenizers.deepseek, {}),
    "gpt_neox": (zoo_tokenizers.gpt_neox, {}),
}
# what the template writes of the family's turn tokens; PAD, tokens that stop the model, BOS in front
PLANNED = {
    "gemma": ("<end_of_turn>", "<pad>", ["<eos>", "<end_of_turn>"], "<bos>"),
    "mixtral": ("[INST]", "<unk>", ["</s>"], "<s>"),
    "qwen3_moe": ("<|im_end|>", "<|endoftext|>", ["<|im_end|>"], None),
    "qwen3_5_text": ("<|im_end|>", "<|endoftext|>", ["<|im_end|>"], None),
    "gpt_oss": ("<|return|><|call|><|end|>", "<|endoftext|>", ["<|return|>", "<|call|>"], None),
    "glm4_moe": ("<|user|><|observation|>", "<|endoftext|>", ["<|endoftext|>", "<|user|>", "<|observation|>"], None),
    "deepseek_v3": ("", "<｜▁pad▁｜>", ["<｜end▁of▁sentence｜>"], "<｜begin▁of▁sentence｜>"),
    "gpt_neox": ("", "<|padding|>", ["<|endoftext|>"], None),
}


def planned(folder, kind, family, pad=None):
    """PAD, stops, BOS. pad: another token that the tokenizer names."""
    make, settings = LAYOUTS[kind]
    make(folder, "{{ messages }}" + PLANNED[kind][0], **settings)
    if pad is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": pad}))
    tokenizer = read_tokenizer_facts(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    tree = replace(SMALL_TREE, config=SMALL_TREE.config | {"model_type": kind, "vocab_size": tokenizer.size})
    model = replace(read_model_facts(folder, tree), family=family)
    notes = Notes()
    plan = plan_tokenizer(run_config(), model, tokenizer, notes)
    assert not notes.faults
    texts = {number: text for text, number in tokenizer.ids.items()}
    bos = texts[plan.bos_id] if plan.bos.value else None
    return plan.pad_token.value, [texts[number] for number in plan.stop.value], bos


@pytest.mark.parametrize("kind", LAYOUTS)
def test_pad_stops_and_bos(tmp_path, kind):
    assert planned(tmp_path, kind, find(kind)) == PLANNED[kind][1:]


# one fact of the row less -> which of (PAD, stops, BOS) is another
TWINS = [
    ("gemma", {"uses_bos": False}, 2),
    ("gemma", {"turn_ends": ()}, 1),
    ("mixtral", {"reserved_pads": ()}, 0),
    ("qwen3_moe", {"turn_ends": ("<|endoftext|>",)}, None),  # EOS is <|im_end|> as well
    ("gpt_oss", {"turn_ends": ("<|call|>", "<|end|>")}, 1),
    ("gpt_oss", {"uses_bos": True}, 2),
    ("glm4_moe", {"turn_ends": ()}, 1),
    ("deepseek_v3", {"forbidden_pads": ()}, 0),
    ("deepseek_v3", {"uses_bos": False}, 2),
    ("gpt_neox", {"reserved_pads": ()}, 0),
    ("gpt_neox", {"uses_bos": True}, 2),
]


@pytest.mark.parametrize(("kind", "changes", "place"), TWINS)
def test_twin_a_fact_less_is_another_plan(tmp_path, kind, changes, place):
    found, expected = planned(tmp_path, kind, replace(find(kind), **changes)), PLANNED[kind][1:]
    assert [number for number in range(3) if found[number] != expected[number]] == ([] if place is None else [place])


@pytest.mark.parametrize(
    ("kind", "pad"),
    [
        ("qwen3_moe", "<|im_end|>"),
        ("gpt_oss", "<|return|>"),
        ("gpt_oss", "<|end|>"),
        ("glm4_moe", "<|user|>"),
        ("gemma", "<end_of_turn>"),
    ],
)
def test_a_token_that_ends_turns_does_not_pad(tmp_path, kind, pad):
    """Elsewhere it is masked with the padding and never learned (TRL issue 6357)."""
    family = find(kind)
    assert planned(tmp_path / "a", kind, family, pad)[0] == PLANNED[kind][1]
    assert planned(tmp_path / "b", kind, replace(family, forbidden_pads=()), pad)[0] == pad  # twin


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_rows_tokens_are_in_the_tokenizer(tmp_path, kind):
    make, settings = LAYOUTS[kind]
    make(tmp_path, None, **settings)
    tokenizer, family = read_tokenizer_facts(tmp_path), find(kind)
    named = [*family.turn_ends, *(pad.token for pad in family.forbidden_pads)]
    if not family.reserved_pads:
        assert tokenizer.pad
    else:
        named.append(next(pad.token for pad in family.reserved_pads if pad.token in tokenizer.ids))
    assert all(map(tokenizer.is_special, named))


def test_every_type_is_one_of_transformers_and_stands_in_one_row():
    types = [kind for family in FAMILIES for kind in family.model_types]
    assert set(types) <= set(CONFIG_MAPPING)
    assert len(types) == len(set(types))
    assert not {"t5", "bert"} & set(types)  # twin: not every type has one


def unused(model: nn.Module, facts: ModelFacts) -> list[str]:
    """Adapters of all-linear without a gradient."""
    request = run_config(adapter={"kind": "lora", "rank": 2}).adapter
    adapted = add_adapter(model, plan_adapter(request, facts, 0, Notes()), seed=1, base="base").train()
    ids = torch.arange(3, 19)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()
    return [name for name, one in adapted.named_parameters() if "lora_B" in name and one.grad is None]


@pytest.mark.parametrize("kind", representatives([*RECURRENT, "jamba", "gemma3n_text"], "mamba"))
def test_every_adapter_of_all_linear_learns(tmp_path, kind):
    """A layer above may multiply with the weight of a linear layer, past its adapter."""
    folder = MODERN[kind](tmp_path)
    facts = facts_of(folder)
    assert not unused(AutoModelForCausalLM.from_pretrained(folder), facts)
    if kind == "mamba":  # twin
        assert facts.family is not None
        every = replace(facts, family=replace(facts.family, without_adapter=("out_proj",)))
        found = unused(AutoModelForCausalLM.from_pretrained(folder), every)
        assert len(found) == facts.layers
        assert all("dt_proj" in name for name in found)


@pytest.mark.parametrize(("kind", "refused"), [("gpt_oss", ["adapter.modules_to_save"]), ("qwen3_moe", [])])
def test_a_module_around_adapters_does_not_train_whole(tmp_path, kind, refused):
    """gpt-oss's attention has a parameter of its own beside its linear layers, so that `rest` means it too."""
    facts, notes = facts_of(MODERN[kind](tmp_path)), Notes()
    request = run_config(adapter={"kind": "lora", "rank": 2, "modules_to_save": "rest"}).adapter
    plan_adapter(with_rest(request, facts, head=True), facts, 0, notes)
    assert [fault.where for fault in notes.faults] == refused


DESCRIBED = [kind for kind in MODERN if find(kind)]


@pytest.mark.parametrize("kind", representatives(DESCRIBED, "granite", "cohere2", "falcon_h1", "olmo2", "gpt_oss"))
def test_the_model_does_to_its_heads_output_what_config_json_says(tmp_path, kind):
    """A plan forecasts chunked logits for every row. The keys are set that some models of the family leave."""
    changes = {"falcon_h1": {"lm_head_multiplier": 0.5}, "granitemoe": {"logits_scaling": 3.0}}
    changes["granitemoehybrid"] = changes["granitemoe"]
    folder = MODERN[kind](tmp_path, **changes.get(kind, {}))
    assert not head_obstacle(AutoModelForCausalLM.from_pretrained(folder).eval())
