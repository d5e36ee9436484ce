"""Axolotl's supervised configs: rows, rates, tokens and templates, beside what its source computes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import refused_settings
from interop.axolotl_configs import CHAT, axolotl, refused
from interop.small_configs import outcome, text_of
from surefoot.interop.axolotl.rows import ALIASES, ROWS
from surefoot.interop.translation import as_yaml, to_json
from surefoot.training.optimizer import Schedule


@pytest.mark.parametrize(
    ("words", "rows", "tokens"),
    [
        ({"flash_attention": True}, 3, 8192),
        ({"attn_implementation": "kernels-community/flash-attn3"}, 3, 8192),
        ({}, 6, 4096),
        ({"attn_implementation": "sdpa"}, 6, 4096),
        ({"eager_attention": True}, 6, 4096),
        ({"flash_attention": True, "multipack_real_batches": True}, 6, 4096),
        ({"sdp_attention": True, "multipack_real_batches": False}, 3, 8192),
    ],
)
def test_rows_of_a_step_are_axolotls(words: dict[str, Any], rows: int, tokens: int) -> None:
    """With `multipack_real_batches` a pass is micro_batch_size bins of sequence_len tokens, else one bin of
    all of them (`_create_multipack_sampler`, 067b021); the default is the former unless attention needs no padding."""
    packed = {"sample_packing": True, "sequence_len": 4096, "micro_batch_size": 2, "gradient_accumulation_steps": 3}
    found = axolotl(**packed, **words)
    assert found.config["batch"] == {"size": rows, "row_tokens": tokens}
    assert outcome(found, "sample_packing") == "changed"
    assert axolotl(**(packed | words | {"sample_packing": False})).config["batch"] == {"size": 6, "micro": 2}


def test_examples_that_see_one_another_there_are_told() -> None:
    """`check_sample_packing_without_attention` warns of them."""

    def note(**words: Any) -> str:
        return next(note.why for note in axolotl(sample_packing=True, **words).notes if "sample_packing" in note.word)

    isolated = note(sdp_attention=True)
    assert note(flash_attention=True) == isolated
    assert note() != isolated
    assert note().startswith(isolated)
    assert note(attn_implementation="kernels-community/vllm-flash-attn3") == note()


def test_what_rows_cannot_be() -> None:
    assert refused(sample_packing=True, rl="dpo", datasets=[{"path": "d", "type": "chatml.intel"}]) == {
        "sample_packing"
    }
    assert refused(attn_implementation="kernels-community/sage-attention") == {"attn_implementation"}  # in 8 bits


def test_batch_size_is_divided_into_passes() -> None:
    """`normalize_config` (067b021): gradient_accumulation_steps (default 1), or batch_size // micro_batch_size."""
    words = {"batch_size": 8, "micro_batch_size": 3}
    found = axolotl(**words)
    assert (found.config["batch"], outcome(found, "batch_size")) == ({"size": 3, "micro": 3}, "listed")
    unset = words | {"gradient_accumulation_steps": None}
    assert axolotl(**unset).config["batch"] == {"size": 6, "micro": 3}
    assert axolotl(**unset, sample_packing=True).config["batch"] == {"size": 6, "row_tokens": 512}
    assert refused(**words, gradient_accumulation_steps=2) == {"batch_size"}
    assert refused(batch_size=2, micro_batch_size=3, gradient_accumulation_steps=None) == {"batch_size"}
    assert refused(micro_batch_size=0) == {"micro_batch_size"}


@pytest.mark.parametrize(
    ("words", "every"),
    [
        ({}, None),
        ({"evals_per_epoch": 0}, None),
        ({"eval_strategy": "no"}, None),
        ({"eval_strategy": "epoch"}, "1 epoch"),
        ({"evals_per_epoch": 2}, "0.5 epochs"),
        ({"eval_steps": 20}, "20 steps"),
    ],
)
def test_evaluations_are_axolotls(words: dict[str, Any], every: str | None) -> None:
    """`_configure_save_and_eval_strategy` (067b021) sets no strategy unless one of the three is set; it saves each
    epoch."""
    found = axolotl(val_set_size=0.1, **words).config
    assert (found.get("eval_every"), found["checkpoint"]["every"]) == (every, "1 epoch")


def cosine_with_floor(step: int, warmup: int, total: int, ratio: float) -> float:
    """Axolotl's `_get_cosine_schedule_with_min_lr_lambda` (067b021)."""
    if step < warmup:
        return step / max(1, warmup)
    scaling = 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
    return (1 - ratio) * scaling + ratio


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_rates_with_a_floor_are_axolotls(ratio: float) -> None:
    optim = axolotl(cosine_min_lr_ratio=ratio, warmup_steps=4, max_steps=20, learning_rate=1.0).config["optim"]
    ours = Schedule(optim.get("schedule", "cosine"), 1.0, 20, 4, 0, from_zero=True, floor=optim.get("floor", 0.0))
    expected = [cosine_with_floor(step, 4, 20, ratio) for step in range(20)]
    assert [ours.rate(step) for step in range(20)] == pytest.approx(expected, abs=1e-12)
    twin = Schedule("cosine", 1.0, 20, 4, 0, from_zero=True)
    assert [twin.rate(step) for step in range(20)] != pytest.approx(expected, abs=1e-3)


def test_a_warm_up_below_one_is_a_share() -> None:
    optim = axolotl(warmup_steps=0.1).config["optim"]
    assert (optim["warmup"], optim["warmup_from_zero"]) == (0.1, True)


def test_the_models_own_tokens_are_checked_and_not_dropped() -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    found = axolotl(special_tokens=tokens)
    assert found.config["tokenizer"] == {"pad": "<pad>", "bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    assert refused(special_tokens={"cls_token": "x"}) == {"special_tokens"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ({"chat_template": "gemma3", "eot_tokens": ["<end_of_turn>"]}, "carried"),
        ({"eot_tokens": ["<|im_end|>"]}, "changed"),  # the tokenizer's own template is not known
        ({"chat_template": "gemma3"}, "assumed"),  # Axolotl would not learn the end
    ],
)
def test_the_end_of_an_answer_is_told(words: dict[str, Any], expected: str) -> None:
    assert outcome(axolotl(**CHAT, **words), "eot_tokens") == expected
    assert refused(**CHAT, chat_template="gemma3", eot_tokens=["<|im_end|>"]) == {"eot_tokens"}


@pytest.mark.parametrize(
    ("words", "key", "value", "expected"),
    [
        ({"optimizer": "paged_adamw_32bit"}, "optim.name", "adamw", "changed"),
        ({"optimizer": "adamw_torch_8bit"}, "optim.name", "adamw_8bit", "changed"),
        ({"optimizer": "adamw_torch_4bit"}, "optim.name", "adamw_8bit", "changed"),
        ({"attn_implementation": "xformers"}, "attention.implementation", "auto", "changed"),
        ({"flex_attention": True}, "attention.implementation", "auto", "changed"),
        ({"model_config": {"output_router_logits": True}}, "model.router_aux_loss_coef", "own", "carried"),
        ({"quantize_moe_experts": True}, "precision.base", "auto", "changed"),
        ({"tokenizer_use_mistral_common": True}, "data.template", "axolotl-alpaca-instruct", "changed"),
    ],
)
def test_words_with_a_meaning_here(words: dict[str, Any], key: str, value: Any, expected: str) -> None:
    found = axolotl(**words)
    group, name = key.split(".")
    assert found.config.get(group, {}).get(name, "auto") == value
    assert outcome(found, next(iter(words))) == expected


@pytest.mark.parametrize(
    "words",
    [
        {"attn_implementation": "sage_attention"},
        {"model_config": {"rope_theta": 1}},
        {"model_quantization_config": "BitNetConfig"},
        {"processor_type": "AutoProcessor"},  # a model of another family
        {"torchdistx_path": "x"},
        {"lr_quadratic_warmup": True},
    ],
)
def test_what_cannot_be_honoured_is_refused(words: dict[str, Any]) -> None:
    assert refused(**words) == set(words)


# Its settings and their defaults: the fields of `AxolotlInputConfig` (067b021), without the block `trl:`.
KEYS = json.loads((Path(__file__).parent / "facts" / "axolotl.json").read_text())


def test_every_setting_of_its_schema_has_a_row() -> None:
    named = [*KEYS, "lora_exclude_module"]
    assert [name for name in named if ALIASES.get(name, name) not in ROWS] == ["lora_exclude_module"]
    both = [name for name in KEYS if name in ROWS and ROWS[name].default and KEYS[name]]
    assert len(both) > 10
    assert [name for name in both if ROWS[name].default != KEYS[name]] == []


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"lora_exclude_modules": ["q_proj"]}, "lora_exclude_modules"),
        ({"dataset_shard_num": 4, "dataset_shard_idx": 0}, "dataset_shard_idx"),
        ({"image_size": 512}, "image_size"),
        ({"tokenizer_config": "another"}, "tokenizer_config"),
        ({"tokenizer_config": "m"}, None),
        ({"optimizer": "muon"}, "optimizer"),
        ({"use_onebitllms": True}, "use_onebitllms"),
        ({"peft_ensure_weight_tying": True}, "peft_ensure_weight_tying"),
        ({"use_onebitllms": False, "peft_ensure_weight_tying": False, "dion_lr": 0.1}, None),
    ],
)
def test_rows_that_change_what_is_trained_are_refused(words: dict[str, Any], name: str | None) -> None:
    if name is None:
        assert {outcome(axolotl(**words), one) for one in words} == {"listed"}
    else:
        assert refused(**words) == {name}


def test_a_key_of_a_tracker_is_hidden() -> None:
    found = axolotl(comet_api_key="abc123secret", comet_mode="get")
    assert "abc123secret" not in json.dumps(to_json(found)) + as_yaml(found)


def test_an_empty_block_is_none() -> None:
    assert axolotl(trl=None) == axolotl()
    assert refused(trl=5) == {"trl"}


def test_thoughts_and_loading_of_a_data_set_have_notes() -> None:
    entry = {"field_thinking": "thinking", "template_thinking_key": "thinking", "ds_type": "json"}
    found = axolotl(datasets=[CHAT["datasets"][0] | entry])
    assert {outcome(found, f"datasets[0].{name}") for name in entry} == {"listed"}
    assert refused(datasets=[CHAT["datasets"][0] | {"field_thinking": "steps"}]) == {"datasets"}
    assert json.dumps(found.config).count("thinking") == 0


TEMPLATE = "{% for message in messages %}{{ message['content'] + eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("words", "entry"),
    [
        ({"chat_template": "jinja", "chat_template_jinja": TEMPLATE}, {}),
        ({"chat_template_jinja": TEMPLATE}, {}),
        ({"chat_template": "chatml"}, {"chat_template": "jinja", "chat_template_jinja": TEMPLATE}),
    ],
)
def test_the_text_of_a_template_is_taken(words: dict[str, Any], entry: dict[str, Any]) -> None:
    found = axolotl(datasets=[CHAT["datasets"][0] | entry], **words)
    assert (found.config["data"]["template"], found.config["bos"]["prepend"]) == (TEMPLATE, "tokenizer")


def test_twin_a_template_that_is_not_there() -> None:
    assert refused(**CHAT, chat_template="jinja") == {"datasets"}
    theirs = [CHAT["datasets"][0] | {"chat_template": "jinja"}]  # Axolotl does not take the config's text for it
    assert refused(datasets=theirs, chat_template="jinja", chat_template_jinja=TEMPLATE) == {"datasets"}
    assert axolotl(**CHAT, chat_template="jinja", chat_template_jinja="t.jinja").config["data"]["template"] == "t.jinja"


PAIRS: dict[str, Any] = {"path": "d.jsonl", "type": "chat_template.default"}


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ({"lr_scheduler": "polynomial", "learning_rate": None}, "learning_rate"),
        ({"lr_scheduler": "polynomial", "learning_rate": 0}, "learning_rate"),
        ({"datasets": [PAIRS | {"message_property_mappings": ["role"]}], "rl": "dpo"}, "datasets"),
        ({"datasets": [PAIRS | {"type": ["alpaca"]}]}, "datasets"),
        ({"datasets": [PAIRS | {"type": ["alpaca"]}], "reward_model": True}, "datasets"),
        ({"datasets": [PAIRS | {"type": {"field": "text"}}]}, "datasets"),
        ({"datasets": [PAIRS | {"type": "alpaca", "data_files": []}]}, "datasets"),
    ],
)
def test_odd_values_are_one_fault_with_its_line(words: dict[str, Any], name: str) -> None:
    text = text_of("axolotl", **words)
    assert refused_settings(lambda: axolotl(**words), text=text) == [name]


def test_the_end_of_a_polynomial() -> None:
    """transformers' `lr_end` is 1e-7."""
    assert axolotl(lr_scheduler="polynomial", learning_rate=1e-5).config["optim"]["floor"] == pytest.approx(0.01)
