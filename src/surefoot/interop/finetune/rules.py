"""Recognize which `finetune.py` a command runs, and translate its flags and the constants in its code.

    source = read_source("finetune.py", text)        # None for any other script
    source.name, source.defaults["weight_decay"]     # "DoRA", 0.0

The programs are recognized by the arguments of `train(…)`. Its defaults and the literals in its TrainingArguments are
read from the syntax tree, so a modified copy trains with its own numbers. Nothing is executed.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.interop.adapters import EIGHT_BITS, set_default_targets
from surefoot.interop.draft import Draft
from surefoot.interop.faults import setting_fault
from surefoot.interop.script.literals import Script, Unread
from surefoot.interop.settings import Refusal, number, one_of, whole
from surefoot.interop.shared_rules import KEEP_ALL, counted, resume_argument, switch
from surefoot.interop.trainer import ROWS, set_precision
from surefoot.interop.translation import Note

GUIDE, ORIGINAL, ALPACA_LORA = "the bf16 migration guide", "LLM-Adapters and DoRA", "alpaca-lora"

_SHARED = {"warmup_steps": 100, "lr_scheduler_type": "linear", "logging_steps": 10, "save_total_limit": 3}
_SHARED |= {"max_grad_norm": 1.0, "fp16": True, "bf16": False}
FIXED: Mapping[str, Mapping[str, Any]] = {
    GUIDE: _SHARED | {"warmup_steps": 300, "lr_scheduler_type": "cosine", "logging_steps": 50},
    ORIGINAL: _SHARED,
    ALPACA_LORA: _SHARED | {"weight_decay": 0.0, "eval_steps": 200, "save_steps": 200},
}
"""TrainingArguments that no flag of the program sets, used if its file cannot be read."""
_OF_THE_TRAINER = (*_SHARED, "weight_decay")  # which transformers has defaults for
_OF_FLAGS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "num_train_epochs"),
    *("learning_rate", "output_dir", "evaluation_strategy", "eval_strategy", "save_strategy", "report_to", "run_name"),
    *("load_best_model_at_end", "group_by_length", "ddp_find_unused_parameters", "seed", "remove_unused_columns"),
    *("dataloader_num_workers", "dataloader_pin_memory", "save_safetensors", "logging_dir", "logging_first_step"),
)
_UNREAD = "is not read: no flag of finetune.py sets it, and surefoot does not know its effect"


@dataclass(frozen=True)
class Fixed:
    """A constant in the code. where: its place, or the program it is known from."""

    value: Any
    where: str


@dataclass(frozen=True)
class Source:
    """A recognized program.

    where: its file, or its name if there is no file.
    fixed: TrainingArguments name -> constant.
    defaults: literal defaults of the arguments of `train`.
    notes: notes on code that is not read.
    """

    name: str
    where: str
    fixed: Mapping[str, Fixed]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()


def known_source(name: str) -> Source:
    """Return what is known of a program without its file."""
    where = f"the finetune.py of {name}"
    return Source(name, where, {argument: Fixed(value, where) for argument, value in FIXED[name].items()})


def read_source(path: str, text: str) -> Source | None:
    """Recognize a program by its code; None for any other script. Raises InputError if it is not valid Python."""
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
    usual = {row.name: row.default for row in ROWS if row.name in _OF_THE_TRAINER}
    fixed |= {argument: Fixed(value, "transformers, by default") for argument, value in usual.items()}
    notes: list[Note] = []
    for word in _training_arguments(script):
        node = word.value.body if isinstance(word.value, ast.IfExp) else word.value  # 200 if val_set_size > 0 else None
        value, where = script.value(node), script.where(node)
        if word.arg in fixed and not isinstance(value, Unread):
            fixed[word.arg] = Fixed(value, where)
        elif not _decided_by_flags(word, arguments) and (word.arg, value) != ("optim", "adamw_torch"):
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
    """Return argument name -> default."""
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


def _decided_by_flags(word: ast.keyword, arguments: Collection[str]) -> bool:
    """Return whether a flag sets it, as in per_device_train_batch_size=micro_batch_size, also within an `if`."""
    used = {node.id for node in ast.walk(word.value) if isinstance(node, ast.Name)}
    return word.arg in _OF_FLAGS or bool(used & set(arguments))


MICRO = ("per_device_train_batch_size", "micro_batch_size")
Rule = Callable[[Draft], None]

_GUIDES_PROMPTS = (
    "LLM-Adapters' prompts, byte for byte; the guide's code has another: data.template=commonsense-sentence"
)
_ONE_TEXT = "prompt and answer are tokenized as one text, and truncated at the end"
_STRADDLING = "a token that spans the end of the prompt and the start of the answer carries loss here, but not there"
_EIGHT_BITS = "16 bits here: more exact, with twice the memory (precision.base: int8 keeps 8 bits)"


_SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def _steps(value: Any) -> str:
    return counted(whole(value), "step")


_CONVERTED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "warmup_steps": ("optim.warmup", _steps),
    "lr_scheduler_type": ("optim.schedule", one_of(_SCHEDULES)),
    "max_grad_norm": ("optim.max_grad_norm", lambda value: number(value) or None),
    "weight_decay": ("optim.weight_decay", number),
    "logging_steps": ("log_every", whole),
    "save_total_limit": ("checkpoint.keep", lambda value: whole(value) if value else KEEP_ALL),
    "save_steps": ("checkpoint.every", _steps),
    "eval_steps": ("eval_every", _steps),
}


def rules_of(source: Source) -> tuple[Rule, ...]:
    own = (set_precision, _attention_kernels) if source.name == GUIDE else (_original_rule(source),)
    return (_fixed_rule(source), *own, _batch, _lengths, _adapter_rest, _data, _tracking, _resume)


def _fixed_rule(source: Source) -> Rule:
    def rule(draft: Draft) -> None:
        draft.set("stage", "sft")
        if draft.given("logging_steps"):
            draft.set("log_every", draft["logging_steps"], "logging_steps")
        for argument, (key, convert) in _CONVERTED.items():
            fixed = source.fixed.get(argument)
            if fixed is None or draft.written(key) is not None:  # a flag decides it
                continue
            if argument == "eval_steps" and not draft["val_set_size"]:
                continue
            try:
                draft.set(key, convert(fixed.value), why=f"{argument}={fixed.value!r} in {fixed.where}")
            except (Refusal, ValueError) as error:
                draft.faults.append(
                    setting_fault(fixed.where, f"{argument}={fixed.value!r}: {error}", "change it there")
                )
        draft.set("optim.warmup_from_zero", True, why="transformers warms up from 0")
        if source.name == GUIDE:
            draft.set("data.template", "commonsense", why=_GUIDES_PROMPTS)
            _set_base(draft, "fp32", "the guide loads weights in fp32")
        for note in source.notes:
            draft.add_note(note)

    return rule


def _original_rule(source: Source) -> Rule:
    def rule(draft: Draft) -> None:
        fixed = source.fixed["bf16"] if source.fixed["bf16"].value else source.fixed["fp16"]
        compute = "fp32" if not fixed.value else "bf16" if fixed is source.fixed["bf16"] else "fp16"
        draft.set("precision.compute", compute, why=f"fixed in {fixed.where}")
        _set_base(draft, compute, "the original loads weights in 16 bits")
        draft.set("data.encoding", "whole", why=_ONE_TEXT)
        if source.name == ALPACA_LORA:
            draft.set("adapter.kind", "lora", why="alpaca-lora has no other adapter")
            draft.add_note(Note("load_in_8bit=True", "changed", (), _EIGHT_BITS, source.where))
        else:
            draft.set("data.template", "commonsense", why="its prompts, byte for byte")

    return rule


def _set_base(draft: Draft, dtype: str, why: str) -> None:
    if "load_8bit" not in draft.rows:
        draft.set("precision.base", dtype, why=why)
    elif draft["load_8bit"]:
        draft.set("precision.base", "int8", "load_8bit", why=EIGHT_BITS)
    else:
        draft.set("precision.base", dtype, "load_8bit", why=why)


def _attention_kernels(draft: Draft) -> None:
    for name, key in (("disable_cudnn_sdpa", "cudnn"), ("disable_flash_sdpa", "flash")):
        allowed = "allowed, but used only if it passes the accuracy check"
        draft.set(f"attention.{key}", "off" if draft[name] else "auto", name, why="" if draft[name] else allowed)
    draft.set("compile", "default" if draft["enable_torch_compile"] else "off", "enable_torch_compile")


def _batch(draft: Draft) -> None:
    names = [name for name in MICRO if name in draft.rows]
    given = [name for name in names if draft.given(name)]
    if len(given) == 2 and draft[names[0]] != draft[names[1]]:
        draft.refuse(names[1], f"{names[0]} says {draft[names[0]]}", "give only one of them")
        return
    micro = given[0] if given else names[0]
    for name in ("batch_size", micro):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    size, examples = draft["batch_size"], draft[micro]
    if examples > size:
        what = f"is {examples}, but batch_size, the examples per step, is {size}"
        draft.refuse(micro, what, f"use at most {size}")
        return
    short = size % examples and f"exactly {size} examples; the original silently uses {size // examples * examples}"
    draft.set("batch.size", size, "batch_size", why=short or "")
    draft.set("batch.micro", examples, *(given or [micro]))


def _lengths(draft: Draft) -> None:
    epochs = draft["num_epochs"]
    if epochs <= 0:
        draft.refuse("num_epochs", f"expected a number above 0, got {epochs:g}")
    else:
        draft.set("duration", counted(epochs, "epoch"), "num_epochs")
    names = [name for name in ("eval_step", "save_step") if name in draft.rows]
    for name in names:
        if draft[name] < 1:
            draft.refuse(name, f"expected a number of steps from 1, got {draft[name]}")
            return
    if held_out := draft["val_set_size"]:
        draft.set("data.eval", held_out, "val_set_size")
        if names:
            draft.set("eval_every", counted(draft["eval_step"], "step"), "eval_step")
    else:
        draft.set("data.eval", "none", "val_set_size")
        draft.drop("nothing is evaluated", "eval_step")
    if names:
        draft.set("checkpoint.every", counted(draft["save_step"], "step"), "save_step")


def _adapter_rest(draft: Draft) -> None:
    if "adapter_name" not in draft.rows:
        draft.set("adapter.targets", draft["lora_target_modules"] or ["q_proj", "v_proj"], "lora_target_modules")
        return
    if str(draft["adapter_name"]).lower() == "rslora":
        draft.set("adapter.rslora", True, "adapter_name")
    if names := draft["target_modules"]:
        draft.set("adapter.targets", names, "target_modules")
    else:
        set_default_targets(draft, "target_modules")
    if draft.given("use_gradient_checkpointing"):
        value = switch(draft["use_gradient_checkpointing"])
        draft.set("gradient_checkpointing", value, "use_gradient_checkpointing")


def _data(draft: Draft) -> None:
    masked = not draft["train_on_inputs"]
    why = _STRADDLING if masked and draft.written("data.encoding") == "whole" else ""
    draft.set("data.train_on", "responses" if masked else "everything", "train_on_inputs", why=why)


def _tracking(draft: Draft) -> None:
    of_the_environment = draft.environment.get("WANDB_PROJECT", "")
    project = draft["wandb_project"] or of_the_environment  # as in the original
    if not project:
        draft.drop("without a W&B project nothing is logged there", "wandb_project", "wandb_run_name", "wandb_online")
        return
    why = "" if draft["wandb_project"] else "WANDB_PROJECT"
    draft.set("report_to", ["wandb"], "wandb_project", why=why)
    draft.set("tracking.project", project, "wandb_project", why=why)
    if draft["wandb_run_name"]:
        draft.set("tracking.name", draft["wandb_run_name"], "wandb_run_name")
    else:
        draft.drop("is empty", "wandb_run_name")
    requested = "wandb_online" not in draft.rows or draft["wandb_online"]
    offline = not requested or draft.environment.get("WANDB_MODE") == "offline"
    draft.set("tracking.offline", offline, "wandb_online", why="WANDB_MODE" if offline and requested else "")


def _resume(draft: Draft) -> None:
    resume_argument(draft, "resume_from_checkpoint", str(draft["output_dir"]))
