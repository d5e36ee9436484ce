"""transformers' TrainingArguments in surefoot's words: the rows and rules that every tool around its Trainer shares.

Defaults are those of transformers 5; a tool that sets others passes its own rows over these. Facts: the docstring of
`transformers.TrainingArguments`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from surefoot.dialects.arithmetic import KEEP_ALL, counted, set_batch, set_duration, set_warmup, switch
from surefoot.dialects.draft import Draft
from surefoot.dialects.resuming import resume_argument
from surefoot.dialects.rows import Refusal, Row, carried, joint, listed, names, number, refused, text, truth, whole

_NODES = "is about several processes; surefoot starts one"
_LOADING = "is about how batches are fetched, and changes no number"
_ALWAYS_EXACT = "every run repeats bit for bit on one machine"
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_restarts": "cosine",
}


def _dropout(value: Any) -> Any:
    return value or None


def _workers(value: int) -> int:
    if value < 0:
        raise Refusal(f"expected a number from 0, got {value}")
    return value


def _strategy(value: Any) -> str:
    if value is False or value == "False":  # what YAML 1.1 makes of `no`
        return "no"
    if value not in ("no", "steps", "epoch", "best"):
        raise ValueError("no, steps or epoch")
    return value


ROWS: tuple[Row, ...] = (
    joint("output_dir", "trainer_output", ("output",), type=text),
    joint("do_train", False, (), "a run trains"),
    joint("do_eval", False, ("eval_every",), "evaluates at the end, as surefoot always does with data.eval"),
    refused("do_predict", False, "surefoot trains here and answers elsewhere", "run `surefoot evaluate` afterwards"),
    joint("per_device_train_batch_size", 8, ("batch.size", "batch.micro"), "times accumulation makes batch.size"),
    joint("gradient_accumulation_steps", 1, ("batch.size",), "times the batch per device makes batch.size"),
    listed("per_device_eval_batch_size", 8, "evaluation takes the room that training leaves"),
    listed("eval_accumulation_steps", None, "evaluation keeps sums, not predictions"),
    listed("batch_eval_metrics", False, "evaluation keeps sums, not predictions"),
    listed("eval_do_concat_batches", True, "evaluation keeps sums, not predictions"),
    listed("include_for_metrics", None, "evaluation keeps sums, not predictions"),
    listed("prediction_loss_only", False, "evaluation keeps sums, not predictions"),
    refused("auto_find_batch_size", False, "a smaller batch trains otherwise", "batch.micro: auto finds what fits"),
    joint("num_train_epochs", 3.0, ("duration",), "max_steps goes before it"),
    joint("max_steps", -1, ("duration",), "above 0 it goes before num_train_epochs"),
    carried("learning_rate", 5e-5, "optim.lr"),
    joint("lr_scheduler_type", "linear", ("optim.schedule",), "linear, cosine, constant, constant_with_warmup"),
    refused("lr_scheduler_kwargs", None, "surefoot's schedules take no further settings", "leave it out", same=({},)),
    joint("warmup_ratio", None, ("optim.warmup", "optim.warmup_from_zero"), "rounded up, from rate 0", type=number),
    joint("warmup_steps", 0.0, ("optim.warmup", "optim.warmup_from_zero"), "goes before warmup_ratio; from rate 0"),
    joint("optim", "adamw_torch_fused", ("optim.name",), "AdamW in torch or 8 bits, adafactor, sgd", type=text),
    refused("optim_args", None, "surefoot's optimizers take no further settings", "leave it out"),
    refused("optim_target_modules", None, "belongs to GaLore and its like, which surefoot has not", "leave it out"),
    carried("weight_decay", 0.0, "optim.weight_decay", about=""),
    joint("adam_beta1", 0.9, ("optim.betas",)),
    joint("adam_beta2", 0.999, ("optim.betas",)),
    joint("adam_epsilon", 1e-8, ("optim.eps",)),
    carried("max_grad_norm", 1.0, "optim.max_grad_norm", _dropout),
    carried("neftune_noise_alpha", None, "optim.neftune_alpha", _dropout, type=number),
    refused("label_smoothing_factor", 0.0, "surefoot's loss smooths no labels", "leave it out"),
    joint("bf16", False, ("precision.compute",)),
    joint("fp16", False, ("precision.compute",)),
    listed("fp16_opt_level", "O1", "surefoot scales fp16 losses by torch's own means"),
    listed("half_precision_backend", "auto", "surefoot takes torch's own means"),
    listed("bf16_full_eval", False, "evaluation computes as training does"),
    listed("fp16_full_eval", False, "evaluation computes as training does"),
    carried("tf32", None, "precision.tf32", lambda value: None if value is None else switch(value), type=truth),
    joint("gradient_checkpointing", False, ("gradient_checkpointing",), type=truth),
    listed("gradient_checkpointing_kwargs", None, "every kind gives the same gradients"),
    joint("torch_compile", False, ("compile",)),
    joint("torch_compile_mode", None, ("compile",)),
    listed("torch_compile_backend", None, "surefoot compiles with inductor"),
    listed("use_liger_kernel", False, "is about speed; surefoot chooses its kernels itself"),
    listed("liger_kernel_config", None, "is about speed; surefoot chooses its kernels itself"),
    listed("torch_empty_cache_steps", None, "surefoot plans its memory"),
    listed("use_cache", False, "training keeps no keys and values"),
    joint("logging_steps", 500, ("log_every",), "the first and the last step are always logged", type=number),
    joint("logging_strategy", "steps", ("log_every",), type=_strategy),
    listed("logging_first_step", False, "the first step is always logged"),
    listed("logging_dir", None, "TensorBoard's files lie in the run folder"),
    listed("logging_nan_inf_filter", True, "a loss that is not finite is logged as such, never as a number"),
    listed("log_level", "passive", "surefoot's own lines are few"),
    listed("log_level_replica", "warning", _NODES),
    listed("log_on_each_node", True, _NODES),
    listed("disable_tqdm", None, "a pipe gets plain lines"),
    joint("eval_strategy", "no", ("eval_every",), "no evaluates at the end only", type=_strategy),
    joint("eval_steps", None, ("eval_every",), "logging_steps where it is not given", type=number),
    refused("eval_delay", 0.0, "surefoot evaluates from the first time on", "leave it out"),
    carried("eval_on_start", False, "eval_at_start"),
    joint("save_strategy", "steps", ("checkpoint.every",), "the last step is always saved", type=_strategy),
    joint("save_steps", 500, ("checkpoint.every",), type=number),
    joint("save_total_limit", None, ("checkpoint.keep",), "the best is kept besides", type=whole),
    listed("save_only_model", False, "every checkpoint can be resumed from"),
    listed("save_safetensors", True, "surefoot writes nothing else"),
    listed("save_on_each_node", False, _NODES),
    listed("enable_jit_checkpoint", False, "a signal always ends in a checkpoint"),
    joint("load_best_model_at_end", False, ("checkpoint.best",)),
    joint("metric_for_best_model", None, ("checkpoint.best",), "the evaluation loss", type=text),
    joint("greater_is_better", None, ("checkpoint.best",), type=truth),
    joint("report_to", "none", ("report_to",), "tensorboard, wandb, mlflow, trackio"),
    joint("run_name", None, ("tracking.name",), type=text),
    joint("project", "huggingface", ("tracking.project",), "trackio's project", type=text),
    refused("trackio_space_id", None, "surefoot's trackers write on this machine", "leave it out"),
    joint("resume_from_checkpoint", None, (), "--resume, from the newest checkpoint that verifies"),
    joint("overwrite_output_dir", False, (), "--overwrite"),
    listed("ignore_data_skip", False, "the order of the data is a function of the step; nothing is skipped"),
    listed("restore_callback_states_from_checkpoint", False, "a checkpoint holds everything that changes"),
    carried("seed", 42, "seed"),
    joint("data_seed", None, ("seed",), "one seed draws everything", type=whole),
    listed("full_determinism", False, _ALWAYS_EXACT),
    joint("use_cpu", False, (), "no accelerator is shown to the run"),
    joint("no_cuda", False, (), "no accelerator is shown to the run"),
    refused("dataloader_drop_last", False, "the last short batch of an epoch is kept", "leave it out"),
    carried("dataloader_num_workers", 0, "data.workers", _workers),
    listed("dataloader_pin_memory", True, _LOADING),
    listed("dataloader_persistent_workers", False, _LOADING),
    listed("dataloader_prefetch_factor", None, _LOADING),
    listed("dataloader_multiprocessing_context", None, _LOADING),
    listed("dataloader_in_order", True, _LOADING),
    listed("remove_unused_columns", True, "surefoot reads the columns of its formats"),
    listed("label_names", None, "labels are the ids of the answers"),
    listed("group_by_length", False, "which examples share a step depends on the seed alone"),
    listed("train_sampling_strategy", "random", "the order of the data depends on the seed alone"),
    listed("length_column_name", "length", "lengths are counted"),
    listed("average_tokens_across_devices", True, "the loss of a step is always the mean over its tokens"),
    listed("include_num_input_tokens_seen", "no", "tokens are always counted"),
    listed("include_tokens_per_second", False, "tokens per second are always logged"),
    listed("skip_memory_metrics", True, "peak memory is always logged"),
    listed("past_index", -1, "is for models that surefoot does not train"),
    listed("debug", "", "surefoot has --debug"),
    listed("ddp_find_unused_parameters", None, _NODES),
    listed("ddp_bucket_cap_mb", None, _NODES),
    listed("ddp_broadcast_buffers", None, _NODES),
    listed("ddp_static_graph", None, _NODES),
    listed("ddp_backend", None, _NODES),
    listed("ddp_timeout", 1800, _NODES),
    listed("local_rank", -1, _NODES),
    listed("accelerator_config", None, _NODES),
    listed("eval_use_gather_object", False, _NODES),
    refused("parallelism_config", None, "several processes come with a later version", "leave it out"),
    refused("fsdp", None, "several processes come with a later version", "leave it out", same=("", [], False)),
    listed("fsdp_config", None, _NODES),
    refused("deepspeed", None, "DeepSpeed comes with a later version", "leave it out: one process needs none of it"),
    joint("push_to_hub", False, (), "--push OWNER/NAME, privately"),
    joint("hub_model_id", None, (), "--push OWNER/NAME, privately", type=text),
    listed("hub_token", None, "surefoot takes HF_TOKEN, or `hf auth login`", secret=True),
    listed("hub_private_repo", None, "surefoot uploads privately, and only at the end"),
    listed("hub_strategy", "every_save", "surefoot uploads at the end"),
    listed("hub_always_push", False, "surefoot uploads at the end"),
    listed("hub_revision", None, "surefoot uploads to the main branch"),
    refused("predict_with_generate", False, "surefoot has metrics.names for this", "metrics: {names: [exact_match]}"),
    listed("generation_max_length", None, "is about answering, not about training"),
    listed("generation_num_beams", None, "is about answering, not about training"),
    listed("sortish_sampler", False, "the order of the data depends on the seed alone"),
)  # fmt: skip

ALIASES: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}


def set_length(draft: Draft) -> None:
    set_duration(draft, "num_train_epochs", "max_steps")


def set_optimizer(draft: Draft) -> None:
    name = str(draft["optim"])
    if (ours := OPTIMIZERS.get(name)) is None:
        draft.refuse("optim", f"surefoot has no {name}", f"it reads {', '.join(OPTIMIZERS)}")
        return
    paged = "its moments are not paged to the CPU" if name.startswith("paged") else ""
    draft.set("optim.name", ours, "optim", why=paged)
    adam = ("adam_beta1", "adam_beta2", "adam_epsilon")
    if ours in ("sgd", "adafactor"):
        draft.drop(f"belongs to AdamW, and optim is {name}", *adam)
        return
    draft.set("optim.betas", [draft["adam_beta1"], draft["adam_beta2"]], "adam_beta1", "adam_beta2")
    draft.set("optim.eps", draft["adam_epsilon"], "adam_epsilon")


def set_schedule(draft: Draft) -> None:
    name = str(draft["lr_scheduler_type"])
    if (ours := SCHEDULES.get(name)) is None:
        draft.refuse("lr_scheduler_type", f"surefoot has no {name}", f"it reads {', '.join(SCHEDULES)}")
        return
    once = "one cycle, which is its default" if name == "cosine_with_restarts" else ""
    draft.set("optim.schedule", ours, "lr_scheduler_type", why=once)
    if name == "constant":  # transformers warms up in constant_with_warmup alone
        draft.set("optim.warmup", 0.0, "lr_scheduler_type")
        draft.drop("lr_scheduler_type: constant has no warm-up", "warmup_steps", "warmup_ratio")
        return
    total = draft["max_steps"] if draft["max_steps"] > 0 else None
    set_warmup(draft, "warmup_steps", "warmup_ratio", total)


def set_precision(draft: Draft, unset: str | None = "fp32", why: str = "") -> None:
    """unset: what neither bf16 nor fp16 means to the tool; None leaves it to the plan, for the reason `why`."""
    if draft["bf16"] and draft["fp16"]:
        draft.refuse("fp16", "bf16 and fp16 exclude each other", "keep one")
        return
    launched = draft.facts.get("mixed_precision")
    chosen = "bf16" if draft["bf16"] else "fp16" if draft["fp16"] else launched or unset
    if chosen is None:
        draft.drop("asks for nothing", "bf16", "fp16")
        draft.assume("bf16: false, fp16: false", why, "precision.compute")
    elif launched and not (draft["bf16"] or draft["fp16"]):
        draft.set("precision.compute", chosen, why="accelerate's mixed_precision")
        draft.drop("asks for nothing", "bf16", "fp16")
    else:
        draft.set("precision.compute", chosen, "bf16" if chosen != "fp16" else "fp16")
        draft.drop("asks for nothing", *(name for name in ("bf16", "fp16") if not draft[name]))


def set_compile(draft: Draft) -> None:
    mode = draft["torch_compile_mode"]
    if not (draft["torch_compile"] or mode):
        draft.drop("asks for nothing", "torch_compile", "torch_compile_mode")
        return
    known = ("default", "reduce-overhead", "max-autotune")
    if (mode or "default") not in known:
        draft.refuse("torch_compile_mode", f"torch has no mode {mode}", f"it has {', '.join(known)}")
        return
    draft.set("compile", mode or "default", "torch_compile", "torch_compile_mode")


def set_logging(draft: Draft) -> None:
    if draft["logging_strategy"] == "epoch":
        draft.refuse("logging_strategy", "surefoot logs every N steps", "give logging_steps")
        return
    if draft["logging_strategy"] == "no":
        draft.refuse("logging_strategy", "surefoot always logs", "give logging_steps a large number")
        return
    if (steps := _steps(draft, "logging_steps")) is not None:
        draft.set("log_every", steps, "logging_steps", "logging_strategy")


def set_evaluation(draft: Draft) -> None:
    """After data.eval is known."""
    strategy = draft["eval_strategy"]
    best = ("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
    if draft.has("data.eval") is None:
        if strategy != "no":
            draft.refuse("eval_strategy", "there is nothing to evaluate on", "name evaluation data, or leave it out")
        if draft["load_best_model_at_end"]:
            draft.refuse("load_best_model_at_end", "there is nothing to evaluate on", "name evaluation data")
        draft.drop("there is nothing to evaluate on", "eval_strategy", "eval_steps", "do_eval", *best)
        return
    if strategy == "epoch":
        draft.set("eval_every", "1 epoch", "eval_strategy")
        draft.drop("eval_strategy is epoch", "eval_steps")
    elif strategy == "steps":
        name = "eval_steps" if draft["eval_steps"] is not None else "logging_steps"
        if (steps := _steps(draft, name)) is not None:
            draft.set("eval_every", counted(steps, "step"), "eval_strategy", name)
    else:
        draft.set("eval_every", None, "eval_strategy", why="" if draft["do_eval"] else "evaluates once, at the end")
        draft.drop("eval_strategy is no", "eval_steps")
    draft.note("do_eval", "carried", "", "data.eval")
    _set_best(draft)


def set_saving(draft: Draft) -> None:
    strategy, limit = draft["save_strategy"], draft["save_total_limit"]
    if strategy == "best":
        fix = "use save_strategy: steps with load_best_model_at_end: true"
        draft.refuse("save_strategy", "surefoot keeps the best checkpoint besides the newest ones", fix)
        return
    if strategy == "epoch":
        draft.set("checkpoint.every", "1 epoch", "save_strategy")
        draft.drop("save_strategy is epoch", "save_steps")
    elif strategy == "no":
        draft.set(
            "checkpoint.every", draft.has("duration") or "3 epochs", "save_strategy", why="saves once, at the end"
        )
        draft.drop("save_strategy is no", "save_steps")
    elif (steps := _steps(draft, "save_steps")) is not None:
        draft.set("checkpoint.every", counted(steps, "step"), "save_steps", "save_strategy")
    if limit is not None and limit < 1:
        draft.refuse("save_total_limit", f"expected a number from 1, got {limit}")
        return
    why = "" if limit else "it deletes no checkpoint"
    draft.set("checkpoint.keep", limit or KEEP_ALL, "save_total_limit", why=why)


def set_trackers(draft: Draft) -> None:
    try:
        asked = [name.lower() for name in names(draft["report_to"])]
    except ValueError:
        asked = []
    chosen = [name for name in asked if name not in ("none", "false")]
    if unknown := [name for name in chosen if name not in TRACKERS]:
        fix = f"it knows {', '.join(TRACKERS)}, none"
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
    """Where the run lies and how it begins: --resume or --overwrite go with the command."""
    output = draft["output_dir"]
    draft.set("output", output, "output_dir")
    if resume_argument(draft, "resume_from_checkpoint", output):
        draft.drop("resume_from_checkpoint goes before it", "overwrite_output_dir")
    elif draft["overwrite_output_dir"]:
        draft.note("overwrite_output_dir", "carried", "", "--overwrite")
        draft.arguments.append("--overwrite")
    else:
        draft.drop("asks for nothing", "overwrite_output_dir")


def set_rest(draft: Draft) -> None:
    """Seeds, devices, checkpointing of activations, uploading."""
    if (seed := draft["data_seed"]) is not None:
        same = seed == draft["seed"]
        draft.note("data_seed", "carried" if same else "changed", "" if same else "one seed draws everything", "seed")
    for name in ("use_cpu", "no_cuda"):
        if draft[name]:
            draft.environment["CUDA_VISIBLE_DEVICES"] = ""
            draft.note(name, "carried", "no accelerator is shown to the run", "CUDA_VISIBLE_DEVICES")
        draft.drop("asks for nothing", *([] if draft[name] else [name]))
    if draft["push_to_hub"]:
        if draft["hub_model_id"] is None:
            draft.refuse("push_to_hub", "names no repository", "give hub_model_id: OWNER/NAME")
            return
        draft.arguments += ["--push", draft["hub_model_id"]]
        draft.note("push_to_hub", "changed", "uploaded once, at the end, privately", "--push")
        draft.note("hub_model_id", "carried", "", "--push")
    draft.drop("nothing is uploaded", *(name for name in ("push_to_hub", "hub_model_id") if not draft["push_to_hub"]))


def set_size(draft: Draft) -> None:
    processes = draft.facts.get("processes", 1)
    set_batch(draft, "per_device_train_batch_size", "gradient_accumulation_steps", processes)


def set_checkpointing(draft: Draft) -> None:
    draft.set("gradient_checkpointing", switch(draft["gradient_checkpointing"]), "gradient_checkpointing")


def set_do_train(draft: Draft) -> None:
    """For scripts and tools that train without being asked to, the word means nothing."""
    draft.note("do_train", "carried", "a run trains")


RULES = (
    set_size,
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
)
"""In this order, after data.eval is written. Precision, checkpointing of activations and do_train differ by tool."""


def _set_best(draft: Draft) -> None:
    metric, load = draft["metric_for_best_model"], draft["load_best_model_at_end"]
    if not (load or metric):
        draft.set("checkpoint.best", "none", "load_best_model_at_end")
        draft.drop("nothing is best", "greater_is_better")
        return
    if (metric or "loss").removeprefix("eval_") != "loss":
        fix = "metric_for_best_model: eval_loss, or leave it out"
        draft.refuse("metric_for_best_model", f"surefoot picks the best checkpoint by the loss, not by {metric}", fix)
        return
    if draft["greater_is_better"]:
        draft.refuse("greater_is_better", "a lower loss is better", "leave it out")
        return
    draft.set("checkpoint.best", "loss", "load_best_model_at_end", "metric_for_best_model")
    draft.note("greater_is_better", "carried", "", "checkpoint.best")


def _steps(draft: Draft, name: str) -> int | None:
    """A number of steps, or of a share of all steps where these are known."""
    value = draft[name]
    if value >= 1 and value == int(value):
        return int(value)
    if 0 < value < 1 and draft["max_steps"] > 0:
        return math.ceil(value * draft["max_steps"])
    share = "a share of all steps, whose number is known only with the data" if 0 < value < 1 else "no number of steps"
    draft.refuse(name, f"{value:g} is {share}", "give a number of steps")
    return None
