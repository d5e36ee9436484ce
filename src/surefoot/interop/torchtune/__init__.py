"""Translate torchtune's recipe YAML with `key=value` overrides, and `tune run RECIPE --config FILE key=value`.

Its files are groups of keys, each with a `_component_`. They are flattened here, so `model.lora_rank` is one setting,
as in an override. Facts: the recipes and components of torchtune 0.6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from surefoot.config.yaml_scalars import scalar_or_text
from surefoot.interop import launchers
from surefoot.interop.draft import Dialect, Draft
from surefoot.interop.faults import command_error, setting_error
from surefoot.interop.launch import Command, Options, in_processes, started
from surefoot.interop.shared_rules import set_together
from surefoot.interop.tool import Tool
from surefoot.interop.torchtune.data import set_data
from surefoot.interop.torchtune.rows import ROWS
from surefoot.interop.torchtune.rules import (
    set_adapter,
    set_length,
    set_loss,
    set_model,
    set_parts,
    set_precision,
    set_qat,
    set_rest,
    set_steps,
    set_teacher,
)
from surefoot.interop.translation import Translation
from surefoot.interop.words import Word, parse_document, read_flat, read_pairs, top_keys
from surefoot.system.errors import InputError

NAME = "torchtune"
RECIPES = ("lora_finetune_single_device", "lora_finetune_distributed")
RECIPES += ("full_finetune_single_device", "full_finetune_distributed")
RECIPES += ("qat_single_device", "qat_distributed", "qat_lora_finetune_distributed")
RECIPES += ("knowledge_distillation_single_device", "knowledge_distillation_distributed")
RECIPES += ("lora_dpo_single_device", "lora_dpo_distributed", "full_dpo_distributed")
_PPO = "write a surefoot config with stage: ppo (docs/ppo.md)"
_NO_TRAINING = ("generate", "dev/generate_v2", "dev/generate_v2_distributed", "eleuther_eval", "quantize")

_DIALECT = Dialect(
    NAME,
    ROWS,
    (set_model, set_length, set_adapter, set_parts, set_precision, set_qat, set_data, set_teacher, set_loss,
     partial(set_together, name="tensor_parallel_dim", what="layers"), set_steps, set_rest),
)  # fmt: skip


def claims_file(path: str, text: str) -> bool:
    keys = top_keys(path, text)
    return {"tokenizer", "checkpointer"} <= keys and bool(keys & {"model", "policy_model"})


_SHARED = {"engine": "fsdp2"}  # sharding of its distributed recipes


def claims_command(command: Command) -> bool:
    return command.name == "tune"


def from_file(path: str, text: str, overrides: Sequence[str], options: Options) -> Translation:
    if not top_keys(path, text) & {"optimizer", "dataset"}:
        raise command_error(path, "is no training: it has neither optimizer nor dataset", "give the config of a recipe")
    if "policy_model" in top_keys(path, text):
        raise command_error(path, "is torchtune's PPO, whose stop tokens and penalties surefoot does not have", _PPO)
    return _translate(_words(text, path, overrides), options)


def from_command(command: Command, options: Options) -> Translation:
    left = list(command.arguments)
    if left[:1] != ["run"]:
        raise command_error(" ".join(("tune", *left[:1])), "is not a training command", "surefoot reads `tune run`")
    del left[0]
    launched = _launched(left, command, options)
    recipe = left.pop(0) if left else ""
    if recipe in _NO_TRAINING:
        raise command_error(f"tune run {recipe}", "is no training", "surefoot generate and surefoot evaluate are close")
    if recipe not in RECIPES:
        raise command_error(
            f"tune run {recipe}".strip(), "is not a recipe that surefoot supports", f"supported: {', '.join(RECIPES)}"
        )
    if left[:1] != ["--config"] or len(left) < 2:
        raise command_error(f"tune run {recipe}", "has no config", "write --config FILE after the recipe")
    path, pairs = left[1], left[2:]
    inside = path if path.endswith((".yaml", ".yml")) else f"recipes/configs/{path}.yaml"  # in its repository
    try:
        text = options.read(inside)
    except InputError:
        if inside == path:
            raise
        fix = f"copy it first: tune cp {path} my.yaml"
        raise command_error(path, f"is a config inside torchtune, and there is no {inside} here", fix) from None
    words = _words(text, inside, pairs)
    shared: dict[str, Any] = dict(_SHARED)
    if any(word.name == "fsdp_cpu_offload" and word.value for word in words):
        shared["offload"] = "all"
    found = in_processes(_translate(words, options, launched.processes), replace(launched, engine=shared))
    return replace(found, environment={**launched.environment, **found.environment})


def _launched(left: list[str], command: Command, options: Options) -> Command:
    """Return the command with the processes of torchrun's flags, which precede the recipe and are removed from
    `left`."""
    settled: dict[str, Any] = {}
    while left and left[0].startswith("--"):
        flag, _, value = left.pop(0).partition("=")
        value = value or (left.pop(0) if left else "")
        name = flag.removeprefix("--").replace("-", "_")
        if name not in launchers.TORCHRUN.with_value:
            raise setting_error(flag, "unknown flag of tune run", "leave it out")
        settled[name] = scalar_or_text(value)
    return started(command, launchers.TORCHRUN, settled, command.environment, options)


def _words(text: str, path: str, overrides: Sequence[str]) -> list[Word]:
    """Return the settings of a file and the overrides after it: `~key` takes one away, and `loss=NAME` exchanges the
    component of a group."""
    words = read_flat(parse_document(text, path), ROWS)
    gone = [one.removeprefix("~") for one in overrides if one.startswith("~")]
    words = [word for word in words if not any(f"{word.name}.".startswith(f"{name}.") for name in gone)]
    groups = {word.name.removesuffix("._component_") for word in words if word.name.endswith("._component_")}
    given = read_pairs([one for one in overrides if not one.startswith("~")])
    return [*words, *(replace(one, name=f"{one.name}._component_") if one.name in groups else one for one in given)]


def _translate(words: Sequence[Word], options: Options, processes: int = 1) -> Translation:
    return Draft(_DIALECT, words, Command("tune", facts={"processes": processes}), options).finish("train")


TORCHTUNE = Tool(NAME, claims_command, from_command, claims_file, from_file)
