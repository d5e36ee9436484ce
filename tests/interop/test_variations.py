"""Variations on documented commands and configs: the words that differ, the keys that differ by them, and no others."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

import pytest

from interop.documented import FILES
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.interop.settings import AT_LEAST

TRL = "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --output_dir out"
TRL_CASES: dict[str, dict[str, Any]] = {
    "--learning_rate 1e-6 --adam_beta2 0.95 --weight_decay 0.1": {
        "optim.lr": 1e-6, "optim.betas": [0.9, 0.95], "optim.weight_decay": 0.1,
    },
    "--lr_scheduler_type cosine --warmup_ratio 0.03": {
        "optim.schedule": "cosine", "optim.warmup": 0.03, "optim.warmup_from_zero": True,
    },
    "--per_device_train_batch_size 2 --gradient_accumulation_steps 16": {"batch.size": 32, "batch.micro": 2},
    "--max_length 4096 --attn_implementation flash_attention_2": {
        "data.max_length": 4096, "attention.implementation": "flash_attention_2",
    },
    "--use_peft --lora_r 64 --lora_alpha 16 --lora_target_modules q_proj k_proj v_proj o_proj": {
        "adapter.kind": "lora", "adapter.rank": 64, "adapter.alpha": 16, "adapter.dropout": 0.05,
        "adapter.targets": ["q_proj", "k_proj", "v_proj", "o_proj"], "precision.base": "fp32",
    },
    "--eval_strategy epoch --dataset_test_split validation --save_strategy epoch --save_total_limit 2": {
        "data.eval.path": "trl-lib/Capybara", "data.eval.split": "validation", "eval_every": "1 epoch",
        "checkpoint.every": "1 epoch", "checkpoint.keep": 2, "checkpoint.best": "none",
    },
    "--logging_steps 1 --report_to wandb --run_name 007 --seed 3 --max_steps 500": {
        "log_every": 1, "report_to": ["wandb"], "tracking.name": "007", "seed": 3, "duration": "500 steps",
    },
}  # fmt: skip
AXOLOTL_CASES: dict[str, dict[str, Any]] = {
    "--lora-r 64 --lora-alpha 128 --lora-dropout 0": {"adapter.rank": 64, "adapter.alpha": 128, "adapter.dropout": 0},
    "--lora-target-linear": {"adapter.targets": "all-linear"},
    "--peft-use-dora --peft-use-rslora": {"adapter.kind": "dora", "adapter.rslora": True},
    "--adapter qlora --load-in-4bit": {"precision.base": "nf4"},
    "--adapter lora --load-in-8bit": {"precision.base": "int8"},
    "--optimizer adamw_torch_fused --lr-scheduler linear --warmup-ratio 0.05": {
        "optim.name": "adamw", "optim.schedule": "linear", "optim.warmup": 0.05,
    },
    "--max-steps 200 --train-on-inputs --seed 7": {
        "duration": "200 steps", "data.train_on": "everything", "seed": 7,
    },
    "--val-set-size 0.02 --evals-per-epoch 1 --early-stopping-patience 2": {
        "data.eval": 0.02, "eval_every": "1 epoch", "early_stopping.patience": 2,
    },
}  # fmt: skip
SCRIPT = FILES["simple_finetune.py"]
SCRIPT_CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("num_train_epochs=3", "max_steps=1000", {"duration": "1000 steps", "optim.warmup": "100 steps"}),
    ("learning_rate=2e-5", "learning_rate=3e-4", {"optim.lr": 3e-4}),
    ("warmup_ratio=0.1", "warmup_steps=100, lr_scheduler_type='cosine'", {
        "optim.warmup": "100 steps", "optim.schedule": "cosine",
    }),
    ("2 * 2", "16", {"batch.size": 64, "batch.micro": 16}),
    ("max_length=256", "max_length=1024", {"data.max_length": 1024}),
    ("save_total_limit=2", "save_strategy='epoch', save_total_limit=1", {
        "checkpoint.every": "1 epoch", "checkpoint.keep": 1,
    }),
    ("fp16=torch.cuda.is_available()", "bf16=True", {"precision.compute": "bf16"}),
    ("trainer.train()", "set_seed(0)\ntrainer.train()", {}),
    ("collator =", "model.gradient_checkpointing_enable()\ntraining_args.seed = 1\ncollator =", {
        "gradient_checkpointing": "on", "seed": 1,
    }),
]  # fmt: skip


def flat(config: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, value in config.items():
        keys |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return keys


def command(words: str) -> dict[str, Any]:
    return flat(translate_command(shlex.split(words), Options(read=FILES.__getitem__)).config)


def script(text: str) -> dict[str, Any]:
    return flat(translate_file("train.py", text, [], Options()).config)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    assert one.keys() - other.keys() <= {"checkpoint.best"}  # the loss, which is also ours, goes unwritten
    return {key: value for key, value in other.items() if key not in one or one[key] != value}


@pytest.mark.parametrize("words", TRL_CASES)
def test_trl(words: str) -> None:
    assert differing(command(TRL), command(f"{TRL} {words}")) == TRL_CASES[words]


@pytest.mark.parametrize("words", AXOLOTL_CASES)
def test_axolotl(words: str) -> None:
    base = "axolotl train lora.yml"
    assert differing(command(base), command(f"{base} {words}")) == AXOLOTL_CASES[words]


@pytest.mark.parametrize(("written", "instead", "expected"), SCRIPT_CASES)
def test_scripts(written: str, instead: str, expected: dict[str, Any]) -> None:
    assert SCRIPT.count(written) == 1
    assert differing(script(SCRIPT), script(SCRIPT.replace(written, instead))) == expected


LIMITED = {
    "TRL": f"{TRL} --save_strategy epoch --save_total_limit ",
    "Axolotl": "axolotl train lora.yml --save_total_limit ",
}


@pytest.mark.parametrize("tool", LIMITED)
def test_one_checkpoint_to_keep_is_told_to_be_two(tool: str) -> None:
    """For `retention` never leaves the newest alone."""

    def noted(limit: int) -> tuple[str, str]:
        translation = translate_command(shlex.split(f"{LIMITED[tool]}{limit}"), Options(read=FILES.__getitem__))
        assert translation.config["checkpoint"]["keep"] == limit
        (note,) = (note for note in translation.notes if "save_total_limit" in note.word)
        return note.outcome, note.why

    assert noted(1) == ("changed", AT_LEAST)
    assert noted(2) == ("carried", "")  # twin


def test_twin_a_word_with_another_value_is_noticed() -> None:
    words = "--learning_rate 1e-6 --adam_beta2 0.95 --weight_decay 0.1"
    assert differing(command(TRL), command(f"{TRL} {words}0")) == TRL_CASES[words]
    assert differing(command(TRL), command(f"{TRL} {words}5")) != TRL_CASES[words]
