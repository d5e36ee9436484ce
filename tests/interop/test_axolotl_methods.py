"""Axolotl's rl and reward_model: each word where it belongs, or refused; texts of its layouts as it writes them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.faults import refused_settings
from helpers.golden_templates import golden_encoder
from surefoot.config.schema import RunConfig
from surefoot.data.chat.templates import make_template
from surefoot.data.formats import RowFault
from surefoot.data.formats.preference import read_judged, read_preference
from surefoot.interop.axolotl.layouts import read_layout
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_file

BASE = {"base_model": "m", "learning_rate": 1e-5, "sequence_len": 1024, "micro_batch_size": 2, "output_dir": "o"}


def text_of(kind: Any = "chatml.intel", entry: dict[str, Any] | None = None, **words: Any) -> str:
    return json.dumps({**BASE, "datasets": [{"path": "d.jsonl", "type": kind, **(entry or {})}], **words})


def translated(kind: Any = "chatml.intel", entry: dict[str, Any] | None = None, **words: Any):
    return translate_file("run.json", text_of(kind, entry, **words), [], Options())


METHODS = [
    ({"rl": "dpo"}, "dpo", None),
    ({"rl": "dpo", "rl_beta": 0.2, "dpo_label_smoothing": 0.1}, "dpo", {"beta": 0.2}),  # which TRL ignores
    ({"rl": "dpo", "dpo_loss_type": ["ipo"], "dpo_label_smoothing": 0.1}, "dpo", {"loss": "ipo"}),
    ({"rl": "dpo", "trl": {"beta": 0.3}}, "dpo", {"beta": 0.3}),
    ({"rl": "dpo", "dpo_loss_type": ["hinge", "sft"], "dpo_loss_weights": [1.0, 0.2]}, "dpo",
     {"loss": "hinge", "sft": 0.2}),
    ({"rl": "dpo", "precompute_ref_log_probs": True}, "dpo", {"reference": "cached"}),
    ({"rl": "ipo", "rl_adapter_ref_model": True}, "dpo", {"loss": "ipo", "reference": "model"}),
    ({"kind": "chat_template.argilla", "rl": "orpo", "orpo_alpha": 0.3}, "dpo",
     {"loss": "orpo", "beta": 0.3, "sft_prompt": True}),
    ({"rl": "simpo", "rl_beta": 2.0}, "dpo", {"loss": "simpo", "beta": 2.0, "sft": 1.0}),
    ({"rl": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0.0}, "dpo", {"loss": "simpo", "margin": 1.0}),
    ({"rl": "kto", "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.5}, "kto", {"good": 1.5, "bad": 0.5}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "stage", "alignment"), METHODS)
def test_methods(words, stage, alignment):
    found = translated(**words)
    assert found.config["stage"] == stage
    wanted = RunConfig.model_validate({**found.config, "alignment": alignment or {}}).alignment
    assert RunConfig.model_validate(found.config).alignment == wanted
    assert "dropout" not in found.config["model"]  # off, as TRL's disable_dropout has it
    assert "train_on" not in found.config["data"]


def test_a_reward_model():
    entry = {"chat_template": "llama3"}
    words = {"reward_model": True, "center_rewards_coefficient": 0.01, "num_labels": 1}
    found = translated("bradley_terry.chat_template", entry, **words).config
    assert (found["stage"], found["reward"]) == ("reward", {"center": 0.01})
    source = {"path": "d.jsonl", "format": "preference", "columns": {"prompt": "input"}}
    assert found["data"] == {"train": source, "template": "llama3", "max_length": 1024}


GROUP = {"max_completion_length": 64, "reward_funcs": ["think_format_reward"], "num_generations": 2}
REFUSED = [  # a type of records, words, the setting that is refused
    ("rewards.transform", {"rl": "grpo", "trl": GROUP}, "datasets"),
    ("chatml.intel", {"rl": "gdpo"}, "rl"),
    ("chatml.intel", {"rl": "dpo", "reward_model": True}, "reward_model"),
    ("zephyr.nectar", {"rl": "dpo"}, "datasets"),
    ("chatml.icr", {"rl": "kto"}, "datasets"),
    ("alpaca", {"rl": "dpo"}, "datasets"),
    ("chatml.intel", {"reward_model": True}, "datasets"),
    ("chatml.intel", {"rl": "dpo", "dpo_norm_loss": True}, "dpo_norm_loss"),
    ("chatml.intel", {"rl": "dpo", "rpo_alpha": 0.5}, "rpo_alpha"),  # schemas/deprecated.py raises
    ("chat_template.argilla", {"rl": "dpo"}, "datasets"),  # prompt_strategies/orpo alone has it, and nothing else
    ("chatml.intel", {"rl": "orpo"}, "datasets"),
    ("chatml.argilla", {"rl": "dpo"}, "datasets"),  # prompt_strategies/dpo has none; kto has
    ("chatml.intel", {"rl": "dpo", "dpo_loss_type": ["aot"]}, "dpo_loss_type"),
    ("chatml.intel", {"rl": "kto", "precompute_ref_log_probs": True}, "precompute_ref_log_probs"),
    ({"prompt_format": "Q: {prompt}"}, {"rl": "dpo"}, "datasets"),
    ({"field_promt": "q"}, {"rl": "dpo"}, "datasets"),
]


def test_what_is_asked_for_in_vain():
    for kind, words, name in REFUSED:
        found = refused_settings(lambda: translated(kind, **words), text=text_of(kind, **words))  # noqa: B023
        assert found[0] == name, (kind, words)
        assert len(found) == len(set(found))  # each is said once


def test_words_of_a_method_that_is_not_asked_for_are_listed():
    found = translated("alpaca", rl_beta=0.1, simpo_gamma=0.5)
    assert {note.outcome for note in found.notes if note.word.startswith(("rl_beta", "simpo"))} == {"listed"}
    assert found.config["stage"] == "sft"


# What Axolotl's strategies make of a record: the prompt and the better answer, as texts.
CHATML = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "{}<|im_end|>"
SYSTEM = "<|im_start|>system\n{}<|im_end|>\n"
LLAMA3 = (
    "<|start_header_id|>user<|end_header_id|>\n\n{}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "{}<|eot_id|>",
)
TURNS = {
    name: [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}]
    for name, text in (("chosen", "So."), ("rejected", "No."))
}
PAIR = {"chosen": "So.", "rejected": "No."}
TEXTS = [
    ("dpo", "chatml.intel", {"system": "Be.", "question": "Why?", **PAIR}, SYSTEM.format("Be."), CHATML),
    ("dpo", "chatml.icr", {"input": "Why?", **PAIR}, "", CHATML),
    ("dpo", "chatml.prompt_pairs", {"prompt": "Why?", **PAIR}, "", CHATML),
    ("dpo", "chatml.argilla_chat", TURNS, "", CHATML),
    ("dpo", "chatml.ultra", {"prompt": "Why?", **TURNS}, "", CHATML),
    ("dpo", "llama3.intel", {"question": "Why?", **PAIR}, "", LLAMA3),
    ("dpo", {"field_prompt": "q", "prompt_format": CHATML[0].format("{prompt}"),
             "chosen_format": "{chosen}<|im_end|>", "rejected_format": "{rejected}<|im_end|>"},
     {"q": "Why?", **PAIR}, "", CHATML),
    ("kto", "chatml.argilla", {"instruction": "Why?", "completion": "So.", "label": True}, "", CHATML),
    ("kto", "chatml.argilla_chat", {"completion": TURNS["chosen"], "label": True}, "", CHATML),
    ("kto", "llama3.intel", {"question": "Why?", "completion": "So.", "label": False}, "", LLAMA3),
]  # fmt: skip


def written(stage: str, kind: Any, record: dict[str, Any]) -> str:
    """The better answer's text, as the translated source and template lay it out, up to the end of its turn."""
    layout = read_layout(stage, {"type": kind})
    columns = layout.columns
    taken = {*columns.values(), *columns}
    row = {name: value for name, value in record.items() if name not in taken}
    row |= {ours: record[own] for ours, own in columns.items() if own in record}
    conversation = read_judged(row) if stage == "kto" else read_preference(row)[0]
    assert layout.template is not None
    template = make_template(layout.template, golden_encoder(), (2,))
    return "".join(segment.text for segment in template.segments(conversation))


@pytest.mark.parametrize(("stage", "kind", "record", "system", "forms"), TEXTS)
def test_texts_are_axolotls(stage, kind, record, system, forms):
    expected = system + forms[0].format("Why?") + forms[1].format("So.")
    assert written(stage, kind, record).removeprefix("<|begin_of_text|>").rstrip("\n") == expected


def test_twin_another_field_is_another_text():
    with pytest.raises(RowFault):
        written("dpo", "chatml.intel", {"input": "Why?", **PAIR})
