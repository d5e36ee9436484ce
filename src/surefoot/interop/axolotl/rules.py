"""Rules for Axolotl settings that have to be translated together."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from surefoot.interop.axolotl.data import set_data
from surefoot.interop.axolotl.methods import set_method, set_prompted
from surefoot.interop.axolotl.trained import set_adapter, set_sight
from surefoot.interop.draft import Draft
from surefoot.interop.settings import ALL_POSITIONS
from surefoot.interop.shared_rules import (
    HEAD_NOT_ROUNDED,
    ROUNDED_UP,
    counted,
    resume_argument,
    set_batch,
    set_duration,
    set_keep,
    switch,
)
from surefoot.interop.sharing import Names, set_sharing
from surefoot.interop.trainer import BEST, set_optimizer, set_schedule_name

USUAL_WARMUP = 0.03  # fraction of all steps if neither warmup_steps nor warmup_ratio is given
_RISE = "surefoot rounds to the nearest step, Axolotl rounds down"
# In Axolotl fsdp_config alone enables FSDP.
_NAMES = Names("micro_batch_size", "gradient_accumulation_steps", "optimizer", "lr_scheduler", implied=True)
_PLUGINS = tuple(f"axolotl.integrations.{name}." for name in ("liger", "cut_cross_entropy", "kernels", "swanlab"))


_QAT = {"weight_dtype": "int8", "activation_dtype": None, "group_size": 32, "quantize_embedding": False,
        "fake_quant_after_n_steps": None}  # fmt: skip
_TWO_GRIDS = "Axolotl trains with asymmetric quantization (min to max of a group) and converts with symmetric"


def set_qat(draft: Draft) -> None:
    given = draft["qat"]
    if given is None:
        draft.drop("no quantization is requested", "qat")
        return
    if unknown := [name for name in given if name not in _QAT]:
        draft.refuse("qat", f"Axolotl's qat has no {unknown[0]}", f"choose from {', '.join(_QAT)}")
        return
    settings = _QAT | given
    types = settings["weight_dtype"], settings["activation_dtype"]
    if types != ("int4", "int8"):
        what = f"surefoot does not support {types[0]} weights with {types[1] or 'full-precision'} activations"
        draft.refuse("qat", what, "use weight_dtype: int4 and activation_dtype: int8, or leave it out")
    elif settings["quantize_embedding"] or settings["fake_quant_after_n_steps"]:
        named = "quantize_embedding" if settings["quantize_embedding"] else "fake_quant_after_n_steps"
        draft.refuse("qat", f"surefoot has no {named}", "leave that out")
    else:
        why = f"{_TWO_GRIDS}; here both are symmetric, and {HEAD_NOT_ROUNDED}"
        draft.set("precision.qat", "int8-int4", "qat", why=why)
        draft.set("precision.qat_group_size", settings["group_size"] or 32, "qat", why=why)


def set_length_limit(draft: Draft) -> None:
    if draft["rl"] == "grpo":
        draft.set("data.max_length", ALL_POSITIONS, why="TRL truncates no prompts")
        draft.drop("is not for rl: grpo", "sequence_len", "excess_length_strategy", "train_on_inputs")
        return
    strategy = draft["excess_length_strategy"] or "drop"
    cut = strategy == "truncate"
    draft.set(
        "data.max_length", draft["sequence_len"], "sequence_len", why="" if cut else draft.rows["sequence_len"].about
    )
    draft.note(
        "excess_length_strategy", "carried" if cut else "changed", "" if cut else "longer examples are truncated"
    )
    if draft.written("stage") == "sft":
        train_on = "everything" if draft["train_on_inputs"] else "responses"
        draft.set("data.train_on", train_on, "train_on_inputs")
    elif draft.written("stage") == "pretrain":
        draft.drop("plain texts are trained on all tokens", "train_on_inputs")
    else:
        draft.drop("only answers are compared", "train_on_inputs")


def set_precision(draft: Draft) -> None:
    names = ("bf16", "fp16", "bfloat16", "float16", "float32")
    bf16 = draft["bf16"]
    if draft["fp16"] and draft.given("bf16") and bf16 not in (False, "auto"):
        draft.refuse("fp16", "bf16 is set as well", "keep one")
        return
    master = "trained weights are kept in fp32"
    if draft["fp16"] or draft["float16"]:
        draft.set("precision.compute", "fp16", "fp16", "float16", why=master if draft["float16"] else "")
    elif bf16 is True or bf16 == "full" or draft["bfloat16"]:
        pure = bf16 == "full" or draft["bfloat16"]
        draft.set("precision.compute", "bf16", "bf16", "bfloat16", why=master if pure else "")
    elif bf16 == "auto" and not draft["float32"]:
        draft.set("precision.compute", "auto", "bf16")
    else:
        draft.set("precision.compute", "fp32", "bf16", "float32")
    draft.drop("is off or not set", *(name for name in names if not draft[name] and name != "bf16"))
    tf32 = draft["tf32"]
    draft.set("precision.tf32", tf32 if tf32 == "auto" else switch(tf32), "tf32")


_EXACT = ("xformers", "flex_attention", "flash_attention_3")  # other kernels of exact attention


def set_attention(draft: Draft) -> None:
    forms = {"flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
             "xformers_attention": "xformers", "flex_attention": "flex_attention"}  # fmt: skip
    requested = {name: form for name, form in forms.items() if draft[name]}
    if draft["attn_implementation"]:
        requested["attn_implementation"] = draft["attn_implementation"]
    if len(set(requested.values())) > 1:
        draft.refuse(next(iter(requested)), f"{' and '.join(requested)} exclude each other", "keep one")
    elif requested:
        name, form = next(iter(requested.items()))
        if form in _EXACT or form.startswith("kernels-community/"):
            draft.set("attention.implementation", "auto", *requested, why=f"{form} computes the same attention")
        elif form not in forms.values():
            draft.refuse(name, f"surefoot has no {form}", f"choose from {', '.join(forms.values())}")
        else:
            draft.set("attention.implementation", form, *requested)


_ROWS = "Axolotl fills the rows anew in every epoch; its rows also end at sample_packing_bin_size (200) examples"


def _set_batch(draft: Draft) -> None:
    """Set the batch: with sample_packing the rows of a step, each of micro_batch_size x sequence_len tokens."""
    decides = "gradient_accumulation_steps"
    micro, passes = draft["micro_batch_size"], draft[decides]
    if draft["batch_size"] and draft.given(decides):
        draft.refuse("batch_size", "gradient_accumulation_steps already sets it", "keep one")
    elif draft["batch_size"] and micro > 0:
        passes, decides = draft["batch_size"] // micro, "batch_size"
    if not draft["sample_packing"] and decides != "batch_size":
        set_batch(draft, "micro_batch_size", decides)
    elif micro < 1 or passes < 1:
        draft.refuse(decides, "a step needs at least one forward pass", "raise it")
    elif draft["sample_packing"] and draft.written("stage") not in ("sft", "pretrain"):
        draft.refuse("sample_packing", "is for supervised training", "leave it out")
    else:
        processes, room = draft.facts.get("processes", 1), micro * draft["sequence_len"]
        why = f"times {processes} processes" if processes > 1 else ""
        rows = 1 if draft["sample_packing"] else micro
        draft.set("batch.size", passes * rows * processes, decides, why=why)
        if draft["sample_packing"]:
            draft.set("batch.row_tokens", room, "sample_packing", "micro_batch_size", "sequence_len", why=_ROWS)
        else:
            draft.set("batch.micro", micro, "micro_batch_size")


def set_steps(draft: Draft) -> None:
    _set_batch(draft)
    set_duration(draft, "num_epochs", "max_steps")
    set_optimizer(draft, "optimizer")
    if set_schedule_name(draft, "lr_scheduler", "warmup_steps", "warmup_ratio"):
        _set_warmup(draft)
    _set_floor(draft)
    value = draft["gradient_checkpointing"]
    offloaded = f"{value} chooses where activations are stored" if isinstance(value, str) else ""
    draft.set("gradient_checkpointing", switch(value), "gradient_checkpointing", why=offloaded)
    mode = draft["torch_compile_mode"]
    if draft["torch_compile"] == "auto":
        draft.note("torch_compile", "changed", "off unless enabled: it rarely pays", "compile")
    else:
        draft.set(
            "compile", (mode or "default") if draft["torch_compile"] else "off", "torch_compile", "torch_compile_mode"
        )


def _set_floor(draft: Draft) -> None:
    ratio = draft["cosine_min_lr_ratio"]
    if ratio and draft["lr_scheduler"] == "cosine":
        whole = ratio == 1  # it ends where it began
        draft.set("optim.schedule" if whole else "optim.floor", "constant" if whole else ratio, "cosine_min_lr_ratio")
    else:
        draft.drop("is for lr_scheduler: cosine, and above 0", "cosine_min_lr_ratio")


def _set_warmup(draft: Draft) -> None:
    steps, ratio = draft["warmup_steps"], draft["warmup_ratio"]
    if steps is not None and 0 < steps < 1:  # a share, since transformers 5
        draft.set("optim.warmup", float(steps), "warmup_steps")
        draft.set("optim.warmup_from_zero", True, "warmup_steps")
        return
    if steps is not None and ratio is not None:
        draft.refuse("warmup_ratio", "warmup_steps already sets it", "keep one")
    elif steps == 0 or ratio == 0:
        draft.set("optim.warmup", 0.0, "warmup_steps", "warmup_ratio")
    else:
        if steps is not None:
            least = "Axolotl's minimum is 2" if steps == 1 else ""
            draft.set("optim.warmup", counted(max(2, math.ceil(steps)), "step"), "warmup_steps", why=least)
        elif ratio is not None:
            draft.set("optim.warmup", float(ratio), "warmup_ratio", why=_RISE)
        else:
            draft.set("optim.warmup", USUAL_WARMUP, why="Axolotl's default, which is at most 100 steps there")
        draft.set("optim.warmup_from_zero", True, "warmup_steps", "warmup_ratio")


def set_evaluation(draft: Draft) -> None:
    held_out = draft["val_set_size"]
    if held_out and draft.given("test_datasets"):
        draft.refuse("val_set_size", "test_datasets already sets it", "keep one")
        return
    if held_out:
        draft.set("data.eval", int(held_out) if held_out > 1 else held_out, "val_set_size")
    elif not draft.given("test_datasets"):
        draft.set("data.eval", "none", "val_set_size")
    names = ("evals_per_epoch", "eval_steps", "eval_strategy")
    if draft.written("data.eval") in (None, "none"):
        draft.drop("there is no evaluation data", *names, "early_stopping_patience", "load_best_model_at_end")
        draft.drop("there are no prompts to generate from", "generate_samples", *_SAMPLES)
        return
    _set_interval(draft, "eval_every", *names, usual="1 epoch")
    patience = draft["early_stopping_patience"]
    best = bool(draft["load_best_model_at_end"] or patience)
    draft.set("checkpoint.best", "loss" if best else "none", "load_best_model_at_end")
    if patience:
        draft.set("early_stopping.patience", patience, "early_stopping_patience")
    if draft["generate_samples"]:
        draft.set("samples.count", draft["num_generation_samples"], "generate_samples", "num_generation_samples")
        draft.set("samples.max_new_tokens", draft["generation_max_new_tokens"], "generation_max_new_tokens")
    else:
        draft.drop("generate_samples is off", "generate_samples", *_SAMPLES)


_SAMPLES = ("num_generation_samples", "generation_max_new_tokens")


def set_saving(draft: Draft) -> None:
    _set_interval(draft, "checkpoint.every", "saves_per_epoch", "save_steps", "save_strategy", usual="1 epoch")
    set_keep(draft, draft["save_total_limit"], "save_total_limit")


def _set_interval(draft: Draft, key: str, per_epoch: str, steps: str, strategy: str, *, usual: str) -> None:
    """Set an interval from a count per epoch, a number (or fraction) of steps, or a strategy."""
    times, every, word = draft[per_epoch], draft[steps], draft[strategy]
    if times and every:
        draft.refuse(steps, f"{per_epoch} already sets it", "keep one")
    elif times:
        draft.set(key, counted(1 / times, "epoch"), per_epoch, strategy, why="" if times == 1 else ROUNDED_UP)
    elif every and every < 1 and (total := draft["max_steps"]) and total > 0:
        draft.set(key, counted(math.ceil(every * total), "step"), steps, strategy)
    elif every and every < 1:
        epochs = every * draft["num_epochs"]
        draft.set(key, counted(epochs, "epoch"), steps, strategy, why="" if epochs == int(epochs) else ROUNDED_UP)
    elif every:
        draft.set(key, counted(every, "step"), steps, strategy)
    elif word in ("no", False, "False"):
        last = {"eval_every": (None, "evaluates once, at the end")}
        value, why = last.get(key, (draft.written("duration") or usual, "saves once, at the end"))
        draft.set(key, value, strategy, why=why)
    elif word in (None, "epoch"):
        draft.set(key, usual, strategy, why="" if word else "Axolotl's default is every epoch")
    elif word == "best":
        fix = f"give {per_epoch} or {steps}, and load_best_model_at_end: true"
        draft.refuse(strategy, BEST, fix)
    else:
        draft.refuse(strategy, f"{word} is not a number of steps", f"give {per_epoch} or {steps}")


def set_trackers(draft: Draft) -> None:
    requested: dict[str, list[str]] = {"wandb": [], "tensorboard": [], "mlflow": [], "trackio": []}
    if draft["use_wandb"] is not False and draft["wandb_project"] and draft["wandb_mode"] != "disabled":
        requested["wandb"] = ["use_wandb", "wandb_project"]
    for tracker in ("tensorboard", "mlflow", "trackio"):
        requested[tracker] = [f"use_{tracker}"] if draft[f"use_{tracker}"] else []
    chosen = [tracker for tracker, words in requested.items() if words]
    names = [name for words in requested.values() for name in words]
    details = ("wandb_name", "wandb_mode", "mlflow_experiment_name", "trackio_project_name")
    every = ("use_wandb", "wandb_project", "use_tensorboard", "use_mlflow", "use_trackio")
    draft.drop("this tracker is off", *(name for name in every if name not in names))
    if not chosen:
        draft.drop("this tracker is off", *details)
        return
    draft.set("report_to", chosen, *names)
    for name in ("wandb_project", "mlflow_experiment_name", "trackio_project_name"):
        if draft[name]:
            draft.set("tracking.project", draft[name], name)
            break
    draft.drop(
        "surefoot has one project for all trackers",
        *(name for name in details[2:] if draft.written("tracking.project") != draft[name]),
    )
    if draft["wandb_name"]:
        draft.set("tracking.name", draft["wandb_name"], "wandb_name")
    draft.set("tracking.offline", draft["wandb_mode"] == "offline", "wandb_mode")


def set_rest(draft: Draft) -> None:
    for name in ("base_model", "learning_rate"):
        if not draft.given(name):
            draft.refuse(name, "is required", "set it")
    _set_tokens(draft)
    _set_model_config(draft)
    for plugin in draft["plugins"] or []:
        if not str(plugin).startswith(_PLUGINS):
            draft.refuse("plugins", f"surefoot has no equivalent of {plugin}", "leave it out")
            return
    draft.drop("affects speed or logging only", "plugins")
    stored = draft["model_quantization_config"]
    if stored not in (None, "Mxfp4Config"):
        draft.refuse("model_quantization_config", f"surefoot decodes no {stored} in this way", "leave it out")
    draft.note("model_quantization_config", "carried", draft.rows["model_quantization_config"].about)
    if draft["hub_model_id"]:
        draft.arguments += ["--push", draft["hub_model_id"]]
        draft.note("hub_model_id", "changed", "uploaded once, at the end, to a private repository", "--push")
    if draft["auto_resume_from_checkpoints"]:
        draft.arguments.append("--resume")
        draft.note("auto_resume_from_checkpoints", "carried", "", "--resume")
        draft.drop("auto_resume_from_checkpoints already sets it", "resume_from_checkpoint")
    else:
        resume_argument(draft, "resume_from_checkpoint", str(draft["output_dir"]))


def _set_tokens(draft: Draft) -> None:
    tokens: Any = draft["special_tokens"]
    given = {name: token for name, token in tokens.items() if token} if isinstance(tokens, dict) else {}
    for name, token in given.items():
        role = name.removesuffix("_token")
        if name not in _ROLES:
            draft.refuse("special_tokens", f"{name}: surefoot reads {', '.join(_ROLES)}", "leave it out")
        else:
            why = "" if role == "pad" else "checked: it must be the tokenizer's own, or the run is refused"
            draft.set(f"tokenizer.{role}", str(token), "special_tokens", why=why)
    if not given:
        draft.drop("is off or not set", "special_tokens")


_ROLES = ("pad_token", "bos_token", "eos_token", "unk_token")


def _set_model_config(draft: Draft) -> None:
    given = draft["model_config"] or {}
    if other := [name for name in given if name != "output_router_logits"]:
        draft.refuse("model_config", f"surefoot takes {other[0]} from the model's own config.json", "change it there")
    elif given.get("output_router_logits"):
        draft.set("model.router_aux_loss_coef", "own", "model_config")
    else:
        draft.drop("is off or not set", "model_config")


RULES = (
    set_data,
    set_method,
    set_adapter,
    set_sight,
    set_qat,
    set_length_limit,
    set_precision,
    set_attention,
    set_steps,
    set_prompted,
    set_evaluation,
    set_saving,
    set_trackers,
    partial(set_sharing, names=_NAMES),
    set_rest,
)
