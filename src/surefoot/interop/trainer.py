"""Translate transformers' TrainingArguments: the rules shared by every tool that is built on its Trainer.

Defaults are those of transformers 5; a tool with other defaults overrides these rows with its own. Facts: the docstring
of `transformers.TrainingArguments`.
"""

from __future__ import annotations

import math
import posixpath

from surefoot.config.dump import shown
from surefoot.interop.draft import Draft
from surefoot.interop.settings import names, number
from surefoot.interop.shared_rules import (
    KEEP_ALL,
    counted,
    resume_argument,
    set_batch,
    set_duration,
    set_keep,
    set_warmup,
)
from surefoot.interop.sharing import set_sharing
from surefoot.interop.trainer_rows import ALIASES, OPTIMIZERS, ROWS, SCHEDULES, TRACKERS
from surefoot.system.messages import nearest_word

BEST = "surefoot keeps the best checkpoint in addition to the newest ones"


def set_length(draft: Draft) -> None:
    set_duration(draft, "num_train_epochs", "max_steps")
    dropped = "changed" if draft["dataloader_drop_last"] else "listed"
    draft.note("dataloader_drop_last", dropped, "the last short batch of an epoch is a step here", "duration")


def set_optimizer(draft: Draft, setting: str = "optim") -> None:
    """Set optim.*. setting: the tool's name for the optimizer; AdamW's settings have the same names in all tools."""
    name = str(draft[setting])
    if (ours := OPTIMIZERS.get(name)) is None:
        draft.refuse(
            setting, f"surefoot reads no {name} of {draft.dialect.tool}", f"supported: {', '.join(OPTIMIZERS)}"
        )
        return
    paged = "the optimizer state is not paged to the CPU" if name.startswith("paged") else ""
    bits = "moments are in bitsandbytes' 8 bits here" if name in ("adamw_torch_8bit", "adamw_torch_4bit") else ""
    draft.set("optim.name", ours, setting, why=paged or bits)
    if ours in ("rmsprop", "sgd", "adafactor"):
        draft.drop(f"belongs to AdamW, but {setting} is {name}", "adam_beta1", "adam_beta2", "adam_epsilon")
        return
    draft.set("optim.betas", [draft["adam_beta1"], draft["adam_beta2"]], "adam_beta1", "adam_beta2")
    draft.set("optim.eps", draft["adam_epsilon"], "adam_epsilon")


def set_schedule_name(draft: Draft, setting: str, *warmup: str) -> bool:
    """Set optim.schedule and return whether it may warm up. setting, warmup: the tool's names for both."""
    name = str(draft[setting])
    if (ours := SCHEDULES.get(name)) is None:
        draft.refuse(setting, f"surefoot reads no {name} of {draft.dialect.tool}", f"supported: {', '.join(SCHEDULES)}")
        return False
    draft.set("optim.schedule", ours, setting)
    _set_floor(draft, setting)
    if name == "constant":  # in transformers only constant_with_warmup warms up
        draft.set("optim.warmup", 0.0, setting)  # explicit: surefoot warms up by default
        draft.drop(f"{setting}: constant has no warm-up", *warmup)
    return name != "constant"


# What transformers' schedules take besides their warm-up, with the only value that surefoot has.
_FIXED = {
    "cosine": {"num_cycles": 0.5},
    "cosine_with_restarts": {"num_cycles": 1},
    "cosine_with_min_lr": {"num_cycles": 0.5},
    "polynomial": {"power": 1.0},
}


_ENDS = {"polynomial": ("lr_end",), "cosine_with_min_lr": ("min_lr", "min_lr_rate")}
_LR_END = 1e-7  # of polynomial


def _set_floor(draft: Draft, setting: str) -> None:
    """Set optim.floor for the schedules of transformers that end above 0. setting: the tool's name for the schedule."""
    name, words = str(draft[setting]), "lr_scheduler_kwargs"
    given = dict(draft[words] or {}) if words in draft.rows and draft.rows[words].kind == "joint" else {}
    ends: dict[str, float] = {}
    for key in _ENDS.get(name, ()):
        if (value := given.pop(key, None)) is not None:
            try:
                ends[key] = number(value)
            except ValueError as error:
                draft.refuse(words, f"{key}: expected {error}, got {shown(value)}")
                return
    if name == "polynomial" and "learning_rate" not in draft.rows:
        draft.refuse(setting, f"surefoot reads no {name} of {draft.dialect.tool}", "use linear")
        return
    if name == "cosine_with_min_lr" and len(ends) != 1:
        draft.refuse(setting, f"{name} takes min_lr or min_lr_rate", f"give one of them in {words}")
        return
    floor = ends.get("min_lr_rate", 0.0)
    lowest = ends.get("min_lr", ends.get("lr_end", _LR_END if name == "polynomial" else 0.0))
    if lowest:
        rate = draft["learning_rate"]
        if rate is None:  # required, as another rule says
            return
        if rate <= 0:
            draft.refuse("learning_rate", f"expected a rate above {lowest:g}, with which {name} ends, got {rate:g}")
            return
        floor = lowest / rate
    if not 0 <= floor < 1:
        what = f"expected a final rate from 0, and below the learning rate, got {floor:g} of it"
        draft.refuse(words if draft.given(words) else setting, what)
        return
    for key, value in given.items():
        if value is not None and value != _FIXED.get(name, {}).get(key, ""):
            draft.refuse(words, f"{key}: {value} has no counterpart with {name}", "leave it out")
    if floor:
        draft.set("optim.floor", floor, setting, words)
    draft.note(words, "carried", "", "optim.schedule")


def set_schedule(draft: Draft) -> None:
    if set_schedule_name(draft, "lr_scheduler_type", "warmup_steps", "warmup_ratio"):
        total = draft["max_steps"] if draft["max_steps"] > 0 else None
        set_warmup(draft, "warmup_steps", "warmup_ratio", total)


def set_precision(draft: Draft, unset: str | None = "fp32", why: str = "") -> None:
    """Set precision.compute. unset: dtype without bf16 and fp16; None leaves it to the plan, with reason `why`."""
    if draft["bf16"] and draft["fp16"]:
        draft.refuse("fp16", "bf16 and fp16 exclude each other", "keep one")
        return
    launched = draft.facts.get("mixed_precision")
    chosen = "bf16" if draft["bf16"] else "fp16" if draft["fp16"] else launched or unset
    if chosen is None:
        draft.assume("bf16: false, fp16: false", why, "precision.compute")
    elif launched and not (draft["bf16"] or draft["fp16"]):
        draft.set("precision.compute", chosen, why="accelerate's mixed_precision")
    else:
        draft.set("precision.compute", chosen, "bf16" if chosen != "fp16" else "fp16")


MODES = ("default", "reduce-overhead", "max-autotune")
_MEANT = {"over-head": "reduce-overhead", "overhead": "reduce-overhead"}


def set_compile(draft: Draft, mode: str = "torch_compile_mode") -> None:
    """Set compile. mode: the tool's setting for torch.compile's mode."""
    word = str(draft[mode] or "default")
    if word not in MODES:
        near = _MEANT.get(word) or nearest_word(word, MODES)
        fix = f"did you mean {near}?" if near else f"choose from {', '.join(MODES)}"
        draft.refuse(mode, f"torch.compile has no mode {word}", fix)
    elif draft["torch_compile"] or draft[mode]:
        draft.set("compile", word, "torch_compile", mode)


def set_logging(draft: Draft) -> None:
    if draft["logging_strategy"] == "epoch":
        draft.refuse("logging_strategy", "surefoot logs every N steps", "give logging_steps")
        return
    if draft["logging_strategy"] == "no":
        draft.refuse("logging_strategy", "surefoot always logs", "set logging_steps to a large number")
        return
    if (steps := _steps(draft, "logging_steps")) is not None:
        draft.set("log_every", steps, "logging_steps", "logging_strategy")


def set_evaluation(draft: Draft) -> None:
    """Set eval_every and checkpoint.best. Runs after data.eval is written."""
    strategy = draft["eval_strategy"]
    best = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    if draft.written("data.eval") is None:
        if strategy != "no":
            draft.refuse("eval_strategy", "there is no evaluation data", "give evaluation data, or leave it out")
        if draft["load_best_model_at_end"]:
            draft.refuse("load_best_model_at_end", "there is no evaluation data", "give evaluation data")
        draft.drop("there is no evaluation data", "eval_strategy", "eval_steps", "do_eval", *best)
        return
    if strategy == "epoch":
        draft.set("eval_every", "1 epoch", "eval_strategy")
        draft.drop("eval_strategy is epoch", "eval_steps")
    elif strategy == "steps":
        name = "eval_steps" if draft["eval_steps"] is not None else "logging_steps"
        if (every := _every(draft, name)) is not None:
            draft.set("eval_every", every, "eval_strategy", name, why=_rounded(every))
    else:
        draft.set("eval_every", None, "eval_strategy", why="" if draft["do_eval"] else "evaluates once, at the end")
        draft.drop("eval_strategy is no", "eval_steps")
    draft.note("do_eval", "carried", "evaluation data are always evaluated at the end", "data.eval")
    _set_best(draft)


def set_saving(draft: Draft) -> None:
    strategy, limit = draft["save_strategy"], draft["save_total_limit"]
    if strategy == "best":
        fix = "use save_strategy: steps with load_best_model_at_end: true"
        draft.refuse("save_strategy", BEST, fix)
        return
    if strategy == "epoch":
        draft.set("checkpoint.every", "1 epoch", "save_strategy")
        draft.drop("save_strategy is epoch", "save_steps")
    elif strategy == "no" or draft["save_steps"] == 0:
        name = "save_strategy" if strategy == "no" else "save_steps"
        draft.set("checkpoint.every", draft.written("duration") or "3 epochs", name, why="saves once, at the end")
        draft.drop(f"{name} is {draft[name]}", *({"save_strategy", "save_steps"} - {name}))
    elif (every := _every(draft, "save_steps")) is not None:
        draft.set("checkpoint.every", every, "save_steps", "save_strategy", why=_rounded(every))
    kept = limit if limit is not None and limit > 0 else None  # transformers deletes none for 0 and below
    set_keep(draft, kept or KEEP_ALL, "save_total_limit", why="" if kept else "Trainer deletes no checkpoint")


def set_trackers(draft: Draft) -> None:
    try:
        requested = [name.lower() for name in names(draft["report_to"])]
    except ValueError:
        requested = []
    chosen = [name for name in requested if name not in ("none", "false")]
    if unknown := [name for name in chosen if name not in TRACKERS]:
        fix = f"supported: {', '.join(TRACKERS)}, none"
        draft.refuse("report_to", f"surefoot has no tracker {unknown[0]}", fix)
        return
    draft.set("report_to", list(dict.fromkeys(chosen)), "report_to")
    if not chosen:
        draft.drop("report_to names no tracker", "run_name", "project")
        return
    if draft.given("run_name"):
        draft.set("tracking.name", draft["run_name"], "run_name")
    if project := draft.environment.get("WANDB_PROJECT") or (draft["project"] if draft.given("project") else None):
        draft.set("tracking.project", project, "project", why="" if draft.given("project") else "WANDB_PROJECT")
    if draft.environment.get("WANDB_MODE") == "offline":
        draft.set("tracking.offline", True, why="WANDB_MODE=offline")


def set_output(draft: Draft) -> None:
    """Set the run folder, and add --resume or --overwrite to the command."""
    output = draft["output_dir"]
    draft.set("output", output, "output_dir")
    if resume_argument(draft, "resume_from_checkpoint", output):
        draft.drop("resume_from_checkpoint takes precedence", "overwrite_output_dir")
    elif draft["overwrite_output_dir"]:
        draft.note("overwrite_output_dir", "carried", "", "--overwrite")
        draft.arguments.append("--overwrite")


def set_rest(draft: Draft) -> None:
    """Translate seeds, devices and uploading."""
    if (seed := draft["data_seed"]) is not None:
        same = seed == draft["seed"]
        draft.note(
            "data_seed",
            "carried" if same else "changed",
            "" if same else "surefoot has one seed for everything",
            "seed",
        )
    for name in ("use_cpu", "no_cuda"):
        if draft[name]:
            draft.environment["CUDA_VISIBLE_DEVICES"] = ""
            draft.note(name, "carried", "the run sees no accelerator", "CUDA_VISIBLE_DEVICES")
    if draft["push_to_hub"]:
        # As in Trainer: a name without an owner is in the account of the token, and the folder's name is the default.
        name = draft["hub_model_id"] or posixpath.basename(posixpath.normpath(draft["output_dir"]))
        draft.arguments += ["--push", name]
        draft.note("push_to_hub", "changed", "uploaded once, at the end, to a private repository", "--push")
        draft.note("hub_model_id", "carried", "", "--push")
    draft.drop("nothing is uploaded", *(name for name in ("push_to_hub", "hub_model_id") if not draft["push_to_hub"]))


def set_size(draft: Draft) -> None:
    set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps")


def set_found_size(draft: Draft) -> None:
    if draft["auto_find_batch_size"]:
        draft.set("batch.micro", "auto", "auto_find_batch_size", why="a step keeps its examples")


def set_do_train(draft: Draft) -> None:
    """Note do_train, which has no effect for tools that always train."""
    draft.note("do_train", "carried", "a run always trains")


def set_order(draft: Draft) -> None:
    if draft["train_sampling_strategy"] == "sequential":
        draft.set("data.order", "file", "train_sampling_strategy")
    else:
        draft.drop("batches depend on the seed alone", "train_sampling_strategy")


__all__ = ["ALIASES", "BEST", "OPTIMIZERS", "ROWS", "RULES", "SCHEDULES"]


RULES = (
    set_size,
    set_found_size,
    set_order,
    set_length,
    set_optimizer,
    set_schedule,
    set_compile,
    set_logging,
    set_evaluation,
    set_saving,
    set_trackers,
    set_output,
    set_rest,
    set_sharing,
)
"""Call in this order, after data.eval is written. Precision and do_train differ by tool."""


def _set_best(draft: Draft) -> None:
    metric, load = draft["metric_for_best_model"], draft["load_best_model_at_end"]
    if not (load or metric):
        draft.set("checkpoint.best", "none", "load_best_model_at_end")
        draft.drop("no best checkpoint is selected", "greater_is_better")
        return
    if (metric or "loss").removeprefix("eval_") != "loss":
        fix = "metric_for_best_model: eval_loss, or leave it out"
        draft.refuse("metric_for_best_model", f"surefoot selects the best checkpoint by loss, not by {metric}", fix)
        return
    if draft["greater_is_better"]:
        draft.refuse("greater_is_better", "a lower loss is better", "leave it out")
        return
    draft.set("checkpoint.best", "loss", "load_best_model_at_end", "metric_for_best_model")
    draft.note("greater_is_better", "carried", "", "checkpoint.best")


def _every(draft: Draft, name: str) -> str | None:
    """Return a length in steps; a fraction of all steps is one in epochs if these set the duration."""
    value = draft[name]
    if 0 < value < 1 and draft["max_steps"] <= 0:
        return counted(value * draft["num_train_epochs"], "epoch")
    steps = _steps(draft, name)
    return None if steps is None else counted(steps, "step")


def _rounded(every: str) -> str:
    return "a fraction of all steps, rounded to the nearest step each time" if "epoch" in every else ""


def _steps(draft: Draft, name: str) -> int | None:
    """Return a number of steps; a fraction of all steps is resolved if max_steps is set. Refuses anything else."""
    value = draft[name]
    if value >= 1 and value == int(value):
        return int(value)
    if 0 < value < 1 and draft["max_steps"] > 0:
        return math.ceil(value * draft["max_steps"])
    share = "a fraction of all steps, whose number depends on the data" if 0 < value < 1 else "not a number of steps"
    draft.refuse(name, f"{value:g} is {share}", "give a number of steps")
    return None
