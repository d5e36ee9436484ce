"""How the flags of a `finetune.py`, and what its text fixes, become a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.interop.arithmetic import KEEP_ALL, counted, switch
from surefoot.interop.draft import Draft
from surefoot.interop.finetune.source import ALPACA_LORA, GUIDE, Source
from surefoot.interop.modules import set_default_targets
from surefoot.interop.resuming import resume_argument
from surefoot.interop.rows import Refusal, number, whole
from surefoot.interop.trainer import set_precision
from surefoot.interop.translation import Note
from surefoot.system.errors import Fault

MICRO = ("per_device_train_batch_size", "micro_batch_size")
Rule = Callable[[Draft], None]

_GUIDES_PROMPTS = (
    "LLM-Adapters' prompts, byte for byte; the guide's code had another, which is data.template=commonsense-sentence"
)
_ONE_TEXT = "prompt and answer are one text there, and what is too long loses its end"
_STRADDLING = "a token that holds the end of the prompt and the begin of the answer is learned here, and was not there"
_EIGHT_BITS = "surefoot holds no weights in 8 bits: in 16 they are more exact, and take twice the memory"


def _schedule(value: Any) -> str:
    names = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if (found := names.get(str(value))) is None:
        raise Refusal("surefoot has no such schedule", "write linear, cosine or constant there")
    return found


def _steps(value: Any) -> str:
    return counted(whole(value), "step")


_TURNS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "warmup_steps": ("optim.warmup", _steps),
    "lr_scheduler_type": ("optim.schedule", _schedule),
    "max_grad_norm": ("optim.max_grad_norm", lambda value: number(value) or None),
    "weight_decay": ("optim.weight_decay", number),
    "logging_steps": ("log_every", whole),
    "save_total_limit": ("checkpoint.keep", lambda value: whole(value) if value else KEEP_ALL),
    "save_steps": ("checkpoint.every", _steps),
    "eval_steps": ("eval_every", _steps),
}


def rules_of(source: Source) -> tuple[Rule, ...]:
    own = (set_precision, _attention_kernels) if source.name == GUIDE else (_original_rule(source),)
    return (_required, _fixed_rule(source), *own, _batch, _lengths, _adapter_rest, _data, _tracking, _resume)


def _fixed_rule(source: Source) -> Rule:
    def rule(draft: Draft) -> None:
        draft.set("stage", "sft")
        if draft.given("logging_steps"):
            draft.set("log_every", draft["logging_steps"], "logging_steps")
        for argument, (key, turn) in _TURNS.items():
            fixed = source.fixed.get(argument)
            if fixed is None or draft.has(key) is not None:  # a flag decides it
                continue
            if argument == "eval_steps" and not draft["val_set_size"]:
                continue
            try:
                draft.set(key, turn(fixed.value), why=f"{argument}={fixed.value!r} in {fixed.where}")
            except (Refusal, ValueError) as error:
                draft.faults.append(
                    Fault(
                        fixed.where,
                        f"{argument}={fixed.value!r}: {error}",
                        "change it there",
                        code="SF-TRANSLATE-SETTING",
                    )
                )
        draft.set("optim.warmup_from_zero", True, why="a warm-up of transformers")
        if source.name == GUIDE:
            draft.set("data.template", "commonsense", why=_GUIDES_PROMPTS)
            draft.set("precision.base", "fp32", why="the guide loads weights in fp32")
        for note in source.notes:
            draft.tell(note)

    return rule


def _original_rule(source: Source) -> Rule:
    def rule(draft: Draft) -> None:
        said = source.fixed["bf16"] if source.fixed["bf16"].value else source.fixed["fp16"]
        compute = "fp32" if not said.value else "bf16" if said is source.fixed["bf16"] else "fp16"
        draft.set("precision.compute", compute, why=f"fixed in {said.where}")
        draft.set("precision.base", compute, why="weights are loaded in 16 bits there")
        draft.set("data.encoding", "whole", why=_ONE_TEXT)
        if source.name == ALPACA_LORA:
            draft.set("adapter.kind", "lora", why="it has no other adapter")
            draft.tell(Note("load_in_8bit=True", "changed", (), _EIGHT_BITS, source.where))
        else:
            draft.set("data.template", "commonsense", why="its prompts, byte for byte")

    return rule


def _attention_kernels(draft: Draft) -> None:
    for name, key in (("disable_cudnn_sdpa", "cudnn"), ("disable_flash_sdpa", "flash")):
        allowed = "allowed, and taken only where it passes the accuracy check"
        draft.set(f"attention.{key}", "off" if draft[name] else "auto", name, why="" if draft[name] else allowed)
    draft.set("compile", "default" if draft["enable_torch_compile"] else "off", "enable_torch_compile")


def _batch(draft: Draft) -> None:
    names = [name for name in MICRO if name in draft.rows]
    given = [name for name in names if draft.given(name)]
    if len(given) == 2 and draft[names[0]] != draft[names[1]]:
        draft.refuse(names[1], f"{names[0]} says {draft[names[0]]}", "give one of them")
        return
    micro = given[0] if given else names[0]
    for name in ("batch_size", micro):
        if draft[name] < 1:
            draft.refuse(name, f"expected a number from 1, got {draft[name]}")
            return
    size, examples = draft["batch_size"], draft[micro]
    if examples > size:
        what = f"is {examples}, and batch_size, the examples of a whole step, is {size}"
        draft.refuse(micro, what, f"use at most {size}")
        return
    short = (
        size % examples and f"exactly {size} examples, where the original silently took {size // examples * examples}"
    )
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
    if held := draft["val_set_size"]:
        draft.set("data.eval", held, "val_set_size")
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
    why = _STRADDLING if masked and draft.has("data.encoding") == "whole" else ""
    draft.set("data.train_on", "responses" if masked else "everything", "train_on_inputs", why=why)


def _tracking(draft: Draft) -> None:
    of_the_environment = draft.environment.get("WANDB_PROJECT", "")
    project = draft["wandb_project"] or of_the_environment  # the original looked there too
    if not project:
        draft.drop("no W&B project is named, so nothing is sent", "wandb_project", "wandb_run_name", "wandb_online")
        return
    why = "" if draft["wandb_project"] else "WANDB_PROJECT"
    draft.set("report_to", ["wandb"], "wandb_project", why=why)
    draft.set("tracking.project", project, "wandb_project", why=why)
    if draft["wandb_run_name"]:
        draft.set("tracking.name", draft["wandb_run_name"], "wandb_run_name")
    else:
        draft.drop("is empty", "wandb_run_name")
    asked = "wandb_online" not in draft.rows or draft["wandb_online"]
    offline = not asked or draft.environment.get("WANDB_MODE") == "offline"
    draft.set("tracking.offline", offline, "wandb_online", why="WANDB_MODE" if offline and asked else "")


def _resume(draft: Draft) -> None:
    resume_argument(draft, "resume_from_checkpoint", str(draft["output_dir"]))


def _required(draft: Draft) -> None:
    if not draft["base_model"]:
        draft.faults.append(
            Fault("--base_model", "is required", "name a folder or hub id", code="SF-TRANSLATE-SETTING")
        )
