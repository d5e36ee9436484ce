"""Translate ms-swift: `swift sft`, `swift pt` and `swift rlhf` with flags, or with a YAML or JSON file first.

    NPROC_PER_NODE=2 swift sft --model Qwen/Qwen2.5-7B-Instruct --dataset swift/self-cognition#500 --model_name Ada

Facts: ms-swift 4 of August 2026 (3602360a). Its Trainer is transformers', with other defaults; its methods are TRL's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.interop import launchers, trainer
from surefoot.interop.adapters import set_loraplus
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import command_error, setting_error
from surefoot.interop.launch import Command, Options, in_processes, inherited, machines_of, with_processes
from surefoot.interop.settings import switches
from surefoot.interop.swift import rules
from surefoot.interop.swift.data import set_data, set_model
from surefoot.interop.swift.rows import ALIASES, PARTS, RLHF_ALIASES, RLHF_PARTS, listed_names, rows_of
from surefoot.interop.tool import Tool
from surefoot.interop.tool_log import ToolLog, trainer_row
from surefoot.interop.translation import Note, Translation
from surefoot.interop.trl.methods import METHODS
from surefoot.interop.words import (
    Word,
    parse_document,
    plain_count,
    read_document,
    read_only_flags,
    read_pairs,
    top_keys,
    without_variables,
)

NAME = "ms-swift"
_SUFFIXES = (".yaml", ".yml", ".json")
_SCRIPTS = {f"{verb}.py": verb for verb in ("sft", "pt", "rlhf")}  # swift/cli/sft.py
_METHODS = {"dpo": "dpo", "orpo": "orpo", "simpo": "cpo", "cpo": "cpo", "kto": "kto", "rm": "reward", "gkd": "gkd",
            "grpo": "grpo"}  # fmt: skip
_MEGATRONS = ("micro_batch_size", "global_batch_size", "device_groups", "recompute_granularity")
_NO_TRAINING = ("infer", "deploy", "export", "eval", "app", "web-ui", "rollout", "sample", "merge-lora")
_MORE_LISTS = (  # beside those that are names
    "reward_funcs reward_weights loss_type loss_weights callbacks stop_words vllm_server_host vllm_server_port "
    "reward_model external_plugins new_special_tokens cached_dataset cached_val_dataset freeze_parameters "
    "trainable_parameters custom_dataset_info eval_dataset teacher_adapters ref_adapters chord_sft_dataset"
)
_ENVIRONMENT = {
    "NPROC_PER_NODE": "the number of processes (parallel.nproc)",
    **dict.fromkeys(("MAX_PIXELS", "IMAGE_MAX_TOKEN_NUM"), "data.max_pixels, for Qwen's models that see"),
    **dict.fromkeys(("VIDEO_MAX_PIXELS", "VIDEO_MAX_TOKEN_NUM", "FPS_MAX_FRAMES", "FPS"), "surefoot reads no video"),
    "NNODES": "the number of machines (parallel.machines)",
    **dict.fromkeys(("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"), launchers.PLACE),
}


def claims_command(command: Command) -> bool:
    return (
        command.name in ("swift", "megatron") or command.program.startswith("swift.cli.") or _of_script(command) != ""
    )


def _of_script(command: Command) -> str:
    return _SCRIPTS.get(command.name, "") if "swift/" in command.program else ""


def claims_file(path: str, text: str) -> bool:
    keys = top_keys(path, text)
    own = {"tuner_type", "train_type", "rlhf_type", "split_dataset_ratio", "torch_dtype"}
    return {"model", "dataset"} <= keys and bool(keys & own) and not keys & {"stage", *_MEGATRONS}


def from_command(command: Command, options: Options) -> Translation:
    left = list(command.arguments)
    verb = _of_script(command) or command.program.removeprefix("swift.cli.")
    if verb in ("swift", "megatron") or "/" in verb:
        verb = left.pop(0) if left else ""
    if command.name == "megatron":
        raise command_error(f"megatron {verb}", "surefoot has no Megatron", "use the command swift, and its settings")
    if verb not in ("sft", "pt", "rlhf"):
        what = "is no training" if verb in _NO_TRAINING else "is no command of ms-swift's training"
        raise command_error(f"swift {verb}".strip(), what, "supported: sft, pt, rlhf")
    in_file: list[Word] = []
    if left and left[0].lower().endswith(_SUFFIXES):
        path = left.pop(0)
        in_file = read_document(parse_document(options.read(path), path))
    rows = {name: row for one in ("", *_METHODS.values()) for name, row in rows_of(one).items()}
    lists = [*_MORE_LISTS.split(), *(name for name, row in rows.items() if row.type is listed_names)]
    words = [*in_file, *read_only_flags(left, switches=switches(rows), lists=lists)]
    return _translated(verb, words, command, options)


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    words = [*read_document(parse_document(text, path)), *read_pairs(overrides)]
    verb = "rlhf" if any(word.name == "rlhf_type" for word in words) else "sft"
    return _translated(verb, words, Command(path, environment=inherited(options)), options)


def _translated(verb: str, words: Sequence[Word], command: Command, options: Options) -> Translation:
    words, own = without_variables(words, "ENV")
    environment = {**own, **command.environment}
    command = _launched(replace(command, environment=environment))
    count = command.processes
    given = {ALIASES.get(word.name, word.name): word.value for word in words if word.value is not None}
    method = ""
    if verb == "rlhf":
        asked = given.get("rlhf_type", "dpo")
        if str(asked) not in _METHODS:
            what = f"rlhf_type: surefoot translates no {asked} of ms-swift"
            raise setting_error(next(word.where for word in words if word.name == "rlhf_type"), what,
                                f"supported: {', '.join(_METHODS)}; surefoot's own: docs/ppo.md")  # fmt: skip
        method = _METHODS[asked]
    defaults = _defaults(given, verb, method, count)
    rows = {name: replace(row, default=defaults.get(name, row.default)) for name, row in rows_of(method).items()}
    aliases = {**ALIASES, **(RLHF_ALIASES if method else {})}
    dialect = Dialect(NAME, rows, _rules(verb, method), aliases, parts=RLHF_PARTS if method else PARTS)
    found = Draft(dialect, words, command, options).finish("train")
    return in_processes(found, command)


def _defaults(given: Mapping[str, Any], verb: str, method: str, count: int) -> dict[str, Any]:
    """Return the defaults that ms-swift takes from other settings."""
    micro = given.get("per_device_train_batch_size", 1)
    passes = math.ceil(16 / (micro if isinstance(micro, int) and micro > 0 else 1) / count)
    held_out = given.get("val_dataset") or given.get("split_dataset_ratio")
    model = str(given.get("model", "")).rstrip("/").rpartition("/")[2]
    simpo = {"beta": 2.0, "loss_type": "simpo"} if given.get("rlhf_type") == "simpo" else {}
    return {
        "learning_rate": 1e-5 if given.get("tuner_type") == "full" else 1e-4,
        "gradient_accumulation_steps": 1 if method == "grpo" else max(1, passes),
        "eval_strategy": given.get("save_strategy", "steps") if held_out else "no",
        "eval_steps": given.get("save_steps", 500),
        "output_dir": f"output/{model}",
        "use_chat_template": False if verb == "pt" else None,
        "loss_scale": "all" if verb == "pt" else None,
        **simpo,
    }


def _rules(verb: str, method: str) -> tuple[Any, ...]:
    def stage(draft: Draft) -> None:
        own = METHODS[method].stage if method else "pretrain" if verb == "pt" else "sft"
        draft.set("stage", own, why="" if own == "sft" else "the command's method")
        if method and method != "grpo":
            draft.set("model.dropout", 0.0, why="TRL, on which ms-swift's trainer is built, disables all dropout")

    own = {
        trainer.set_size: rules.set_size,
        trainer.set_evaluation: rules.set_evaluation,
        trainer.set_trackers: rules.set_trackers,
    }
    usual = tuple(own.get(rule, rule) for rule in trainer.RULES)
    last = (rules.set_packing, rules.set_more, set_loraplus("lorap_lr_ratio"), *((rules.set_method,) if method else ()))
    begun = (stage, set_model, rules.set_adapter, set_data, rules.set_texts, rules.set_pixels, rules.set_precision)
    return (*begun, _set_rate, trainer.set_do_train, *usual, *last)


def _set_rate(draft: Draft) -> None:
    draft.set("optim.lr", draft["learning_rate"], "learning_rate")


def _launched(command: Command) -> Command:
    """Return the command with its processes: torchrun's, else NPROC_PER_NODE, else one. Raises InputError."""
    count, machines = command.processes, machines_of(command)
    if not command.launcher:
        asked = command.environment.get("NPROC_PER_NODE", "").strip()
        each = plain_count(asked) if asked else 1
        if not each:
            raise setting_error("NPROC_PER_NODE", f"expected a number of processes from 1, got {asked!r}")
        count = each * machines
    return with_processes(command, count, machines)


def environment_note(note: Note) -> Note:
    reason = _ENVIRONMENT.get(note.where)
    return note if reason is None else replace(note, outcome="listed", why=reason)


SWIFT = Tool(
    NAME,
    claims_command,
    from_command,
    claims_file,
    from_file,
    environment_note=environment_note,
    log=lambda translation: ToolLog(row=trainer_row),
    rows=rows_of(""),
)
