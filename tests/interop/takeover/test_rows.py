"""Rows are taken from batches of every layout that trainers have, or what they hold is named."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertLMHeadModel, DataCollatorForSeq2Seq, Trainer

from interop.takeover.test_take_over import (  # noqa: F401
    Texts,
    base,
    build,
    context,
    handed,
    proven,
    raises_code,
    refused,
    translated,
)
from surefoot.interop.takeover.in_script import own_loss
from surefoot.interop.takeover.in_script.handover import _is_routed
from surefoot.interop.takeover.in_script.rows import is_sided, pair_of, scored_pair, sides_of, without_led
from surefoot.models.decoder import decoder_layers

PROMPT, BETTER, WORSE = [5, 6, 7], [8, 9], [10]
SIDED = {
    "prompt_input_ids": [PROMPT], "prompt_attention_mask": [[1, 1, 1]], "chosen_input_ids": [BETTER],
    "chosen_attention_mask": [[1, 1]], "rejected_input_ids": [WORSE], "rejected_attention_mask": [[1]],
}  # fmt: skip
"""A batch of one pair, as TRL 0.12's PreferenceCollator returns it."""
JOINED = {
    "input_ids": [PROMPT + BETTER, [*PROMPT, *WORSE, 0]], "attention_mask": [[1] * 5, [1, 1, 1, 1, 0]],
    "completion_mask": [[0, 0, 0, 1, 1], [0, 0, 0, 1, 0]],
}  # fmt: skip
"""The same pair, as TRL 1.16 has it."""


def test_pairs_with_columns_for_each_side_are_those_of_later_versions():
    read = pair_of(None)
    assert read(SIDED) == read(JOINED)
    assert read(SIDED)[0]["rejected"] == {"input_ids": [5, 6, 7, 10], "labels": [-100, -100, -100, 10]}
    twin = {**SIDED, "prompt_input_ids": [[5, 6]], "prompt_attention_mask": [[1, 1]], "chosen_input_ids": [[7, 8, 9]],
            "chosen_attention_mask": [[1, 1, 1]]}  # fmt: skip
    assert read(twin) != read(JOINED)


def test_pairs_whose_answers_have_the_prompt_and_labels_are_taken_as_they_are():
    """Of DPO before TRL 0.12, and ORPO, whose batches have the prompt as well."""
    labels = {"chosen": [-100, -100, -100, *BETTER], "rejected": [-100, -100, -100, *WORSE]}
    whole = {**SIDED, **{f"{name}_labels": [one] for name, one in labels.items()}}
    for name, answer in (("chosen", BETTER), ("rejected", WORSE)):
        whole |= {f"{name}_input_ids": [PROMPT + answer], f"{name}_attention_mask": [[1] * (3 + len(answer))]}
    assert pair_of(None)(whole) == sides_of(whole) == pair_of(None)(SIDED)
    assert not is_sided(whole)
    assert is_sided(SIDED)  # twin


def test_a_pair_that_is_cut_in_the_models_pass_is_refused():
    assert not pair_of(5)(SIDED)[1]
    assert pair_of(4)(SIDED)[1]
    assert not pair_of(4)(JOINED)[1]  # twin: later versions have cut it


def test_scored_pairs_with_columns_for_each_side_are_those_of_later_versions():
    read = scored_pair(0)
    sided = {"input_ids_chosen": [[5, 8, 9]], "attention_mask_chosen": [[1, 1, 1]], "input_ids_rejected": [[5, 10, 0]],
             "attention_mask_rejected": [[1, 1, 0]], "return_loss": True}  # fmt: skip
    later = {"input_ids": [[5, 8, 9], [5, 10, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
    assert read(sided) == read(later)
    assert read({**sided, "margin": [0.5]})[1]


class Judged(Texts):
    """Rows of other lengths, some with a column that no language model reads."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        for number, row in enumerate(self.rows):
            row["input_ids"] = row["input_ids"][: 6 + number]
            row["attention_mask"] = row["attention_mask"][: 6 + number]

    def __getitem__(self, place):
        return {**super().__getitem__(place), "label": place % 2}


def padded_left(build):  # noqa: F811
    trainer = build(data=Judged)
    trainer.data_collator.tokenizer.padding_side = "left"
    return trainer


@pytest.mark.usefixtures("context")
def test_rows_that_are_padded_on_the_left_are_taken_without_what_padding_predicts(build, tmp_path, monkeypatch):  # noqa: F811
    taken, over = handed(padded_left(build), tmp_path / "taken")
    proven(taken, over)
    assert over.loss_of([0, 5, 9])["led"] == 2  # of three rows the longest has no padding
    monkeypatch.setattr(own_loss, "without_led", lambda batch: (batch, 0))  # twin: as the trainer itself computes
    with raises_code("SF-TAKE-OVER"):
        proven(taken, over)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_labels_that_padding_precedes_are_left_out(dtype):
    labels = torch.tensor([[-100, -100, 5, 6], [7, 8, 9, 9], [-100, 5, 6, -100], [-100, -100, -100, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=dtype)
    found, led = without_led({"labels": labels, "attention_mask": mask})
    assert led == 2
    assert found["labels"].tolist() == [
        [-100, -100, -100, 6], [7, 8, 9, 9], [-100, -100, 6, -100], [-100, -100, -100, 6],
    ]  # fmt: skip
    assert labels[0, 2] == 5  # the collator's own


class LearnsPadding(Texts):
    def __getitem__(self, place):
        ids = (self.rows[place]["input_ids"] + [0] * 40)[:40]
        kept = len(self.rows[place]["input_ids"])
        return {"input_ids": ids, "labels": ids, "attention_mask": [1] * kept + [0] * (40 - kept)}


def test_labels_that_the_attention_mask_hides_are_refused_by_name(build, tmp_path):  # noqa: F811
    from transformers import default_data_collator

    trainer = build(data=LearnsPadding)
    trainer.data_collator = default_data_collator
    taken, _ = handed(trainer, tmp_path / "taken")
    assert refused(taken) == {"train_dataset": False}


class Learned(Texts):
    def __getitem__(self, place):
        return {**super().__getitem__(place), "labels": list(self.rows[place]["input_ids"])}


class Unlearned(Texts):
    def __getitem__(self, place):
        return {**super().__getitem__(place), "labels": [-100] * len(self.rows[place]["input_ids"])}


@pytest.mark.usefixtures("context")
def test_evaluation_data_without_labels_are_left_out(build, base, tmp_path):  # noqa: F811
    held = Unlearned(AutoTokenizer.from_pretrained(base))
    trainer = build(data=Learned, eval_dataset=held, arguments={"eval_strategy": "steps", "eval_steps": 1})
    trainer.data_collator = DataCollatorForSeq2Seq(trainer.processing_class)
    taken, over = handed(trainer, tmp_path / "taken")
    assert "eval" not in translated(taken).config["data"]
    assert [one["name"] for one in taken.record["noted"]] == ["eval_dataset"]
    proven(taken, over)
    trainer.train_dataset = held  # twin: training data are needed
    assert refused(handed(trainer, tmp_path / "twin")[0]) == {"train_dataset": False}


def test_the_scripts_only_tokenizer_is_taken_where_the_trainer_has_none(build, base, tmp_path, monkeypatch):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(base)
    trainer = build()
    collator, trainer.processing_class = trainer.data_collator, None
    trainer.data_collator = lambda rows: collator(rows)
    trainer.model.config._name_or_path = ""
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(tokenizer=tokenizer, tok=tokenizer, other=3))
    taken, _ = handed(trainer, tmp_path / "taken")
    assert refused(taken) == {}
    assert [one["name"] for one in taken.record["noted"]] == ["processing_class"]
    assert AutoTokenizer.from_pretrained(taken.folder / "model").get_vocab() == tokenizer.get_vocab()
    two = SimpleNamespace(one=tokenizer, two=AutoTokenizer.from_pretrained(base))  # twin: which is it?
    monkeypatch.setitem(sys.modules, "__main__", two)
    assert refused(handed(trainer, tmp_path / "twin")[0]) == {"processing_class": False}


@pytest.mark.parametrize("nested", [False, True])
def test_experts_are_seen_in_configs_of_every_version(nested):
    def config(**named):
        plain = SimpleNamespace(**named)
        return SimpleNamespace(get_text_config=lambda: plain) if nested else plain

    assert _is_routed(config(output_router_logits=False))
    assert not _is_routed(config())


@pytest.mark.parametrize("routed", [False, True])
def test_a_routers_coefficient_counts_only_where_the_model_has_one(build, tmp_path, routed):  # noqa: F811
    from surefoot.interop.takeover.session import Taken

    taken, _ = handed(build(), tmp_path / "taken")
    assert taken.record["routed"] is False
    arguments = {**taken.record["arguments"], "router_aux_loss_coef": 0.001, "max_prompt_length": 64}
    record = {**taken.record, "trainer": "DPOTrainer", "arguments": arguments, "routed": routed}
    model = translated(Taken(taken.folder, record)).config["model"]
    assert model["router_aux_loss_coef"] == 0.001 if routed else "router_aux_loss_coef" not in model


def test_no_steps_between_checkpoints_saves_at_the_end(build, tmp_path):  # noqa: F811
    arguments = {"save_steps": 0, "max_steps": 7}
    taken, _ = handed(build(Trainer, arguments=arguments), tmp_path / "taken")
    assert translated(taken).config["checkpoint"]["every"] == "7 steps"
    taken.record["arguments"]["save_steps"] = 2  # twin
    assert translated(taken).config["checkpoint"]["every"] == "2 steps"


@pytest.mark.parametrize("ahead", [True, False])
def test_an_encoder_is_refused_by_its_kind(build, tmp_path, ahead):  # noqa: F811
    """As a decoder, BERT is one that surefoot does not know."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertLMHeadModel(BertConfig(**sizes, vocab_size=400, is_decoder=not ahead))
    taken, _ = handed(build(model=model), tmp_path / "taken")
    assert refused(taken) == ({"model": False} if ahead else {})
    with raises_code("SF-MODEL-KIND"):
        decoder_layers(model)
