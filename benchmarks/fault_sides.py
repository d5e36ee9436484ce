"""The three that `faults_elsewhere.py` breaks: how each is told the same run, and what its files are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Side:
    """name: as printed. child: its word in fault_child.py. python: the interpreter that has it. config: the run, in
    its own words, with paths in the folder of the trial. keys: where a setting stands in it. files: of a checkpoint,
    by what they hold; the last one written is `last`. command: in front of the config. resume: what asks for it, as a
    word behind the config or as a key in it."""

    name: str
    child: str
    python: str
    config: Mapping[str, Any]
    keys: Mapping[str, str]
    files: Mapping[str, str]
    command: tuple[str, ...] = ()
    resume: str | Mapping[str, Any] = field(default_factory=dict)


# Six steps of four examples, a checkpoint after each second step, everything else as it comes. Where a tool takes its
# precision from the machine, fp32 is asked for, so that a run repeats bit for bit.
_TRAINER: dict[str, Any] = {
    "output_dir": "out",
    "per_device_train_batch_size": 4,
    "max_steps": 6,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "save_steps": 2,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
}
_TRAINER_KEYS = {"lr": "learning_rate", "batch": "per_device_train_batch_size", "seed": "seed"}
_TRAINER_FILES = {
    "weights": "adapter_model.safetensors",
    "optimizer": "optimizer.pt",
    "state": "trainer_state.json",
    "random": "rng_state.pth",
    "last": "trainer_state.json",
}


def surefoot(python: str) -> Side:
    return Side(
        "surefoot",
        "surefoot",
        python,
        {
            "stage": "sft",
            "model": "base",
            "adapter": {"kind": "lora", "rank": 4, "dropout": 0.1},
            "data": {"train": "train.jsonl", "max_length": 128},
            "precision": "fp32",
            "batch": {"size": 4},
            "optim": {"lr": 0.01, "schedule": "constant", "warmup": 0.0},
            "duration": "6 steps",
            "checkpoint": {"every": "2 steps"},
            "output": "out",
        },
        {
            "lr": "optim.lr",
            "batch": "batch.size",
            "seed": "seed",
            "length": "data.max_length",
            "targets": "adapter.targets",
            "clip": "optim.max_grad_norm",
        },
        {
            "weights": "adapter_model.safetensors",
            "optimizer": "optimizer.safetensors",
            "state": "state.json",
            "random": "state.json",
            "last": "MANIFEST.json",
        },
        ("train",),
        "--resume",
    )


def trainer(python: str) -> Side:
    return Side(
        "HF Trainer + PEFT",
        "trainer",
        python,
        {"model": "base", "data": "train.jsonl", "max_length": 128, **_TRAINER},
        {**_TRAINER_KEYS, "length": "max_length", "targets": "lora_targets", "clip": "max_grad_norm"},
        _TRAINER_FILES,
        resume={"resume": True},
    )


def llamafactory(python: str) -> Side:
    own = {
        "stage": "sft",
        "do_train": True,
        "model_name_or_path": "base",
        "dataset": "mine",
        "dataset_dir": ".",
        "cutoff_len": 128,
        "finetuning_type": "lora",
        "lora_rank": 4,
        "lora_dropout": 0.1,
        "lora_target": "all",
    }
    return Side(
        "LLaMA-Factory",
        "llamafactory",
        python,
        {**own, **_TRAINER},
        {**_TRAINER_KEYS, "length": "cutoff_len", "targets": "lora_target", "clip": "max_grad_norm"},
        _TRAINER_FILES,
        ("train",),
        {"resume_from_checkpoint": True},
    )
