"""The lines of LLaMA-Factory, and that they say no more than the run did."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.config.schema import RunConfig
from surefoot.interop import finetune
from surefoot.interop.llamafactory.log_lines import log_lines
from surefoot.interop.tool_log import End, RunFacts, trainer_row
from surefoot.interop.translation import Translation

CONFIG = RunConfig.model_validate({"stage": "sft", "model": "m", "data": {"train": "d.json"}, "output": "out"})
FACTS = RunFacts(
    config=CONFIG,
    embedding="model.embed_tokens",
    bos=1,
    pad="<pad>",
    pad_id=0,
    added_rows=0,
    base="fp32",
    compute="fp32",
    attention="sdpa",
    device="cpu",
    ids=(1, 5, 6, 7),
    learned=(False, False, True, True),
    text="<s> hello",
    answer="llo",
)


def scaled(factor: float) -> RunFacts:
    return replace(FACTS, config=RunConfig.model_validate(CONFIG.model_dump() | {"bos": {"scale": factor}}))


def lines(facts: RunFacts, template: str | None = "phi") -> list[str]:
    return list(log_lines(Translation("LLaMA-Factory", "train", {}, (), given={"template": template})).ready(facts))


def test_rows_are_trainers():
    assert trainer_row({"loss": 1.23444, "grad_norm": 0.5, "lr": 0.0005, "epoch": 1.0}) == [
        "{'loss': 1.2344, 'grad_norm': 0.5, 'learning_rate': 0.0005, 'epoch': 1.0}"
    ]
    assert trainer_row({"eval_loss": 1.123, "eval_accuracy": 0.85, "epoch": 1.0}) == [
        "{'eval_loss': 1.123, 'eval_accuracy': 0.85, 'epoch': 1.0}"
    ]


def test_a_loss_that_is_not_finite_is_no_number():
    assert trainer_row({"loss": None, "grad_norm": None, "lr": 0.0005, "epoch": 1.0}) == [
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 0.0005, 'epoch': 1.0}"
    ]


def test_the_training_example():
    assert lines(FACTS) == [
        "training example:",
        "input_ids:\n[1, 5, 6, 7]",
        "inputs:\n<s> hello",
        "label_ids:\n[-100, -100, 6, 7]",
        "labels:\nllo",
    ]


@pytest.mark.parametrize(("factor", "words"), [(0.0, "zeroed out"), (0.1, "scaled by 0.1"), (0.05, "scaled by 0.05")])
def test_the_factor_is_the_one_of_the_run(factor, words):
    said = lines(scaled(factor))
    assert f"   - Position 0 embeddings will be {words}" in said
    assert "✅ Found embedding layer: model.embed_tokens" in said
    assert "✅ Added BOS token (1) to sequence of length 3 -> 4" in said


def test_what_was_not_done_is_not_said():
    assert not any("BOS" in line for line in lines(FACTS))
    without = lines(replace(scaled(0.1), bos=None))
    assert not any("BOS token" in line for line in without)
    assert not any("vanilla" in line for line in lines(FACTS))
    assert "Using vanilla attention implementation." in lines(replace(FACTS, attention="eager"))


def test_the_end():
    bos = log_lines(Translation("LLaMA-Factory", "train", {}, (), given={"use_bos_zero_training": True}))
    written = End("out", frozenset({"bos_zero_config.json"}), {})
    assert bos.finished(written) == [
        "💾 BOS zeroing configuration saved to out/bos_zero_config.json",
        "Training completed successfully!",
    ]
    assert bos.finished(End("out", frozenset(), {})) == ["Training completed successfully!"]


@pytest.mark.parametrize("template", ["llama3", "mistral", None])
def test_a_bos_that_the_template_writes_was_not_added(template):
    said = lines(scaled(0.1), template)
    assert "   - BOS tokens will be added to sequences" not in said
    assert not any("Added BOS" in line for line in said)
    assert any("hook registered" in line for line in said)


@pytest.mark.parametrize(
    ("device", "attention", "compute", "cudnn", "said"),
    [
        ("cuda", "sdpa", "bf16", "off", True),
        ("cpu", "sdpa", "bf16", "off", False),
        ("cuda", "eager", "bf16", "off", False),
        ("cuda", "sdpa", "fp32", "off", False),
        ("cuda", "sdpa", "bf16", "auto", False),
    ],
)
def test_cudnn_is_disabled_only_where_it_could_have_run(device, attention, compute, cudnn, said):
    config = RunConfig.model_validate(CONFIG.model_dump() | {"attention": {"implementation": "sdpa", "cudnn": cudnn}})
    facts = replace(FACTS, device=device, attention=attention, compute=compute, config=config)
    found = finetune.log_lines(Translation("finetune.py", "train", {}, ())).ready(facts)
    assert ("Disabled cuDNN SDPA for bf16 stability" in found) == said


@pytest.mark.parametrize("name", finetune.MICRO)
def test_the_banner_says_what_is_trained_with(name):
    found = finetune.from_keywords({"base_model": "m", "data_path": "d.json", name: 2})
    assert {"micro_batch_size: 2", "per_device_train_batch_size: 2"} <= set(finetune.banner(found))
