"""Which of the programs called `finetune.py` a command means, and what its own text settles.

    source = read_source("finetune.py", text)        # None: a script of another kind
    source.name, source.defaults["weight_decay"]     # "DoRA", 0.0

They are told apart by the arguments of `train(…)`. Its defaults and the literals of its TrainingArguments are read from
the syntax tree, so a copy with numbers of its own trains with these; nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.interop.script.literals import Script, Unread
from surefoot.interop.translation import Note

GUIDE, ORIGINAL, ALPACA_LORA = "the bf16 migration guide", "LLM-Adapters and DoRA", "alpaca-lora"

_SHARED = {"warmup_steps": 100, "lr_scheduler_type": "linear", "logging_steps": 10, "save_total_limit": 3}
_SHARED |= {"max_grad_norm": 1.0, "fp16": True, "bf16": False}
FIXED: Mapping[str, Mapping[str, Any]] = {
    GUIDE: _SHARED | {"warmup_steps": 300, "lr_scheduler_type": "cosine", "logging_steps": 50},
    ORIGINAL: _SHARED,
    ALPACA_LORA: _SHARED | {"weight_decay": 0.0, "eval_steps": 200, "save_steps": 200},
}
"""Settings of TrainingArguments that no flag of the program decides, where its text is not at hand."""
_UNSAID = {"warmup_steps": 0, "lr_scheduler_type": "linear", "logging_steps": 500, "save_total_limit": None}
_UNSAID |= {"max_grad_norm": 1.0, "fp16": False, "bf16": False, "weight_decay": 0.0}  # transformers' own defaults
_OF_FLAGS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("learning_rate", "output_dir", "evaluation_strategy", "eval_strategy", "save_strategy", "report_to", "run_name"),
    *("load_best_model_at_end", "group_by_length", "ddp_find_unused_parameters", "seed", "remove_unused_columns"),
    *("dataloader_num_workers", "dataloader_pin_memory", "save_safetensors", "logging_dir", "logging_first_step"),
)
_UNREAD = "is not read: no flag of finetune.py says it, and surefoot does not know what it changes"


@dataclass(frozen=True)
class Fixed:
    """where: the place that says it, or the program that does."""

    value: Any
    where: str


@dataclass(frozen=True)
class Source:
    """where: what says it. defaults: of the arguments of `train`, where they are literals. notes: what of it is not
    read."""

    name: str
    where: str
    fixed: Mapping[str, Fixed]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def known_source(name: str) -> Source:
    """What a program is known to do."""
    where = f"the finetune.py of {name}"
    return Source(name, where, {argument: Fixed(value, where) for argument, value in FIXED[name].items()})


def read_source(path: str, text: str) -> Source | None:
    """Raises InputError where it is no Python."""
    script = Script.parse(text, path)
    functions = [node for node in ast.walk(script.tree) if isinstance(node, ast.FunctionDef) and node.name == "train"]
    imported = {node.module or "" for node in ast.walk(script.tree) if isinstance(node, ast.ImportFrom)}
    if any(module.partition(".")[0] == "surefoot" for module in imported):
        return known_source(GUIDE)  # the script that `surefoot compat` writes
    if not functions or (name := _name(_arguments(functions[0]))) is None:
        return None
    arguments = _arguments(functions[0])
    read = {name: script.value(default) for name, default in arguments.items() if default is not None}
    literal = {name: value for name, value in read.items() if not isinstance(value, Unread)}
    fixed = {argument: Fixed(value, path) for argument, value in FIXED[name].items()}
    fixed |= {argument: Fixed(value, "transformers, by default") for argument, value in _UNSAID.items()}
    notes: list[Note] = []
    for word in _training_arguments(script):
        said = word.value.body if isinstance(word.value, ast.IfExp) else word.value  # 200 if val_set_size > 0 else None
        value, where = script.value(said), script.where(said)
        if word.arg in fixed and not isinstance(value, Unread):
            fixed[word.arg] = Fixed(value, where)
        elif not _told_by_flags(word, arguments) and (word.arg, value) != ("optim", "adamw_torch"):
            notes.append(Note(f"{word.arg}={script.text(word.value)}", "changed", (), _UNREAD, where))
    return Source(name, path, fixed, literal, tuple(notes))


def _name(arguments: Collection[str]) -> str | None:
    if "base_model" not in arguments:
        return None
    if {"attn_implementation", "per_device_train_batch_size"} & set(arguments):
        return GUIDE
    if "adapter_name" in arguments:
        return ORIGINAL
    return ALPACA_LORA if "lora_target_modules" in arguments else None


def _arguments(function: ast.FunctionDef) -> dict[str, ast.expr | None]:
    """Name -> default."""
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [*[None] * (len(plain) - len(given.defaults)), *given.defaults]
    pairs = [*zip(plain, defaults, strict=True), *zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    return {argument.arg: default for argument, default in pairs}


def _training_arguments(script: Script) -> list[ast.keyword]:
    calls = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call)]
    return [
        word
        for call in calls
        if script.callee(call).rpartition(".")[2] == "TrainingArguments"
        for word in call.keywords
        if word.arg is not None
    ]


def _told_by_flags(word: ast.keyword, arguments: Collection[str]) -> bool:
    """Whether a flag decides it, alone or with `if`; per_device_train_batch_size=micro_batch_size, say."""
    used = {node.id for node in ast.walk(word.value) if isinstance(node, ast.Name)}
    return word.arg in _OF_FLAGS or bool(used & set(arguments))
