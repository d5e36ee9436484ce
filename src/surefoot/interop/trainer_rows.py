"""Rows for transformers' TrainingArguments, shared by every tool that is built on its Trainer, with the names of its
optimizers and schedules. The rules that read them are in `interop.trainer`.

Facts: the docstring of `transformers.TrainingArguments` 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.interop.backward import (
    clipped,
    differs,
    equals,
    interval,
    item,
    keeps_best,
    length,
    micro,
    never,
    passes,
    reverse,
    schedule,
    schedule_words,
    sharding,
    strategy,
    unless,
    warmup,
)  # fmt: skip
from surefoot.interop.settings import (
    AT_LEAST,
    OWN_KERNELS,
    Refusal,
    Row,
    all_listed,
    carried,
    file_or_group,
    group,
    joint,
    listed,
    number,
    refused,
    text,
    truth,
    whole,
)
from surefoot.interop.shared_rules import KEEP_ALL, on_or_auto, switch

_ENGINE = ("parallel.engine", "parallel.zero_stage", "parallel.offload")
_NODES = "is for multi-process launchers; surefoot starts its own processes"
_LOADING = "affects how batches are loaded, not results"
_ALWAYS_EXACT = "everything else is bit-for-bit reproducible on one machine"
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")
OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "paged_adamw": "adamw",
    "paged_adamw_32bit": "adamw",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_torch_4bit": "adamw_8bit",
    "adafactor": "adafactor",
    "rmsprop": "rmsprop",
    "sgd": "sgd",
}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_restarts": "cosine",
    "cosine_with_min_lr": "cosine",
    "polynomial": "linear",
    "inverse_sqrt": "inverse_sqrt",
}


def _dropout(value: Any) -> Any:
    return value or None


def _workers(value: int) -> int:
    if value < 0:
        raise Refusal(f"expected a number from 0, got {value}")
    return value


def _strategy(value: Any) -> str:
    if value is False or value == "False":  # YAML 1.1 reads `no` as false
        return "no"
    if value not in ("no", "steps", "epoch", "best"):
        raise ValueError("no, steps or epoch")
    return value


ROWS: tuple[Row, ...] = (
    joint("output_dir", "trainer_output", ("output",), type=text),
    joint("do_train", False, (), "a run always trains"),
    joint("do_eval", False, ("eval_every",), "evaluates at the end, as surefoot always does if data.eval is set"),
    refused("do_predict", False, "surefoot train does not predict", "run `surefoot evaluate` afterwards"),
    joint("per_device_train_batch_size", 8, ("batch.size", "batch.micro"), "times accumulation steps gives batch.size",
          back=micro),
    joint("gradient_accumulation_steps", 1, ("batch.size",), "times the batch per device gives batch.size",
          back=passes),
    listed("per_device_eval_batch_size", 8, "evaluation batches are sized to the memory that training leaves"),
    *all_listed("evaluation accumulates sums, not predictions", "eval_accumulation_steps include_for_metrics",
                batch_eval_metrics=False, eval_do_concat_batches=True, prediction_loss_only=False),
    joint("auto_find_batch_size", False, ("batch.micro",), "auto; a step keeps its examples", back=never),
    joint("num_train_epochs", 3.0, ("duration",), "max_steps takes precedence", back=length("duration", "epochs")),
    joint("max_steps", -1, ("duration",), "above 0 it overrides num_train_epochs", back=length("duration", "steps")),
    carried("learning_rate", 5e-5, "optim.lr"),
    joint("lr_scheduler_type", "linear", ("optim.schedule",), f"one of {', '.join(SCHEDULES)}", back=schedule),
    joint("lr_scheduler_kwargs", None, ("optim.floor",), "min_lr, min_lr_rate, lr_end", type=group,
          back=schedule_words),
    joint("warmup_ratio", None, ("optim.warmup", "optim.warmup_from_zero"), "rounded up; from rate 0", type=number,
          back=never),
    joint("warmup_steps", 0.0, ("optim.warmup", "optim.warmup_from_zero"), "overrides warmup_ratio; starts at rate 0",
          back=warmup),
    joint("optim", "adamw_torch_fused", ("optim.name",), "AdamW in torch or 8 bits, adafactor, rmsprop, sgd", type=text,
          back=reverse("optim.name", OPTIMIZERS)),
    refused("optim_args", None, "surefoot's optimizers take no further settings"),
    refused("optim_target_modules", None, "belongs to GaLore and similar, which surefoot lacks"),
    carried("weight_decay", 0.0, "optim.weight_decay", about=""),
    joint("adam_beta1", 0.9, ("optim.betas",), back=item("optim.betas", 0)),
    joint("adam_beta2", 0.999, ("optim.betas",), back=item("optim.betas", 1)),
    joint("adam_epsilon", 1e-8, ("optim.eps",)),
    carried("max_grad_norm", 1.0, "optim.max_grad_norm", _dropout, null=0.0, back=clipped("optim.max_grad_norm")),
    carried("neftune_noise_alpha", None, "optim.neftune_alpha", _dropout, type=number),
    refused("label_smoothing_factor", 0.0, "surefoot's loss has no label smoothing"),
    joint("bf16", False, ("precision.compute",), back=equals("precision.compute", "bf16")),
    joint("fp16", False, ("precision.compute",), back=equals("precision.compute", "fp16")),
    listed("fp16_opt_level", "O1", "surefoot uses torch's loss scaling for fp16"),
    listed("half_precision_backend", "auto", "surefoot uses torch's mixed precision"),
    *all_listed("evaluation computes in the same precision as training", bf16_full_eval=False, fp16_full_eval=False),
    carried("tf32", None, "precision.tf32", lambda value: None if value is None else switch(value), type=truth),
    carried("gradient_checkpointing", False, "gradient_checkpointing", switch),
    listed("gradient_checkpointing_kwargs", None, "all variants give the same gradients"),
    joint("torch_compile", False, ("compile",), back=differs("compile", "off")),
    joint("torch_compile_mode", None, ("compile",), back=unless("compile", "off", "default")),
    listed("torch_compile_backend", None, "surefoot compiles with inductor"),
    *all_listed(OWN_KERNELS, use_liger_kernel=False, liger_kernel_config=None),
    listed("torch_empty_cache_steps", None, "surefoot plans its memory"),
    listed("use_cache", False, "training uses no key-value cache"),
    joint("logging_steps", 500, ("log_every",), "the first and the last step are always logged", type=number),
    joint("logging_strategy", "steps", ("log_every",), type=_strategy, back=never),
    listed("logging_first_step", False, "the first step is always logged"),
    listed("logging_dir", None, "TensorBoard files are in the run folder"),
    listed("logging_nan_inf_filter", True, "a non-finite loss is logged as such, never as a number"),
    listed("log_level", "passive", "surefoot prints few lines"),
    *all_listed(_NODES, log_level_replica="warning", log_on_each_node=True),
    listed("disable_tqdm", None, "output to a pipe has no progress bar"),
    joint("eval_strategy", "no", ("eval_every",), "no: evaluates only at the end", type=_strategy,
          back=strategy("eval_every")),
    joint("eval_steps", None, ("eval_every",), "default: logging_steps", type=number, back=interval("eval_every")),
    refused("eval_delay", 0.0, "surefoot does not delay evaluation"),
    carried("eval_on_start", False, "eval_at_start"),
    joint("save_strategy", "steps", ("checkpoint.every",), "the last step is always saved", type=_strategy,
          back=strategy("checkpoint.every")),
    joint("save_steps", 500, ("checkpoint.every",), type=number, back=interval("checkpoint.every")),
    joint("save_total_limit", None, ("checkpoint.keep",), f"the best is kept in addition; {AT_LEAST}", type=whole,
          back=unless("checkpoint.keep", KEEP_ALL)),
    listed("save_only_model", False, "every checkpoint can be resumed from"),
    listed("save_safetensors", True, "surefoot only writes safetensors"),
    listed("save_on_each_node", False, _NODES),
    listed("enable_jit_checkpoint", False, "a signal always writes a checkpoint"),
    joint("load_best_model_at_end", False, ("checkpoint.best",), back=keeps_best),
    joint("metric_for_best_model", None, ("checkpoint.best",), "the evaluation loss", type=text, back=never),
    joint("greater_is_better", None, ("checkpoint.best",), type=truth),
    joint("report_to", "none", ("report_to",), "tensorboard, wandb, mlflow, trackio",
          back=lambda ours: ours["report_to"] or "none"),
    joint("run_name", None, ("tracking.name",), type=text),
    joint("project", "huggingface", ("tracking.project",), "trackio's project", type=text),
    listed("trackio_space_id", None, "is set by the tracker's own environment variables"),
    joint("resume_from_checkpoint", None, (), "--resume, from the newest checkpoint that verifies"),
    joint("overwrite_output_dir", False, (), "--overwrite"),
    listed("ignore_data_skip", False, "data order is a function of the step, so nothing has to be skipped"),
    listed("restore_callback_states_from_checkpoint", False, "a checkpoint holds the whole state"),
    carried("seed", 42, "seed"),
    joint("data_seed", None, ("seed",), "surefoot has one seed for everything", type=whole, back=never),
    carried("full_determinism", False, "attention.deterministic", on_or_auto, _ALWAYS_EXACT),
    joint("use_cpu", False, (), "the run sees no accelerator"),
    joint("no_cuda", False, (), "the run sees no accelerator"),
    joint("dataloader_drop_last", False, ("duration",), "the last short batch of an epoch is a step", back=never),
    carried("dataloader_num_workers", 0, "data.workers", _workers),
    *all_listed(_LOADING, "dataloader_prefetch_factor dataloader_multiprocessing_context", dataloader_pin_memory=True,
                dataloader_persistent_workers=False, dataloader_in_order=True),
    listed("remove_unused_columns", True, "surefoot reads only the columns of its formats"),
    listed("label_names", None, "labels are the token ids"),
    listed("group_by_length", False, "batches depend on the seed alone"),
    joint("train_sampling_strategy", "random", ("data.order",), "sequential; batches depend on the seed alone else",
          back=lambda ours: "sequential" if ours["data.order"] == "file" else None),
    listed("length_column_name", "length", "surefoot computes lengths itself"),
    listed("average_tokens_across_devices", True, "the loss of a step is always the mean over its tokens"),
    listed("include_num_input_tokens_seen", "no", "tokens are always counted"),
    listed("include_tokens_per_second", False, "tokens per second are always logged"),
    listed("skip_memory_metrics", True, "peak memory is always logged"),
    listed("past_index", -1, "is for models that surefoot does not train"),
    listed("debug", "", "use surefoot --debug"),
    *all_listed(_NODES, "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
                "ddp_backend accelerator_config", ddp_timeout=1800, local_rank=-1, eval_use_gather_object=False),
    refused("parallelism_config", None, "surefoot configures this with parallel.engine"),
    joint("fsdp", None, _ENGINE, "full_shard and similar; with offload, everything in host memory", back=sharding),
    joint("fsdp_config", None, ("parallel.offload", "gradient_checkpointing"), "read key by key", type=file_or_group),
    *all_listed("each layer is a unit", fsdp_transformer_layer_cls_to_wrap=None, fsdp_min_num_params=0),
    joint("deepspeed", None, _ENGINE, "a JSON file, translated key by key: ZeRO stage, offloading", type=file_or_group),
    joint("push_to_hub", False, (), "--push NAME, to a private repository"),
    joint("hub_model_id", None, (), "--push NAME, to a private repository", type=text),
    listed("hub_token", None, "surefoot uses HF_TOKEN or `hf auth login`", secret=True),
    listed("hub_private_repo", None, "surefoot uploads to a private repository, once, at the end"),
    *all_listed("surefoot uploads at the end", hub_strategy="every_save", hub_always_push=False),
    listed("hub_revision", None, "surefoot uploads to the main branch"),
    refused("predict_with_generate", False, "use metrics.names instead", "write metrics: {names: [exact_match]}"),
    *all_listed("applies to generation, not training", generation_max_length=None, generation_num_beams=None),
    listed("sortish_sampler", False, "data order depends on the seed alone"),
)  # fmt: skip

ALIASES: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
