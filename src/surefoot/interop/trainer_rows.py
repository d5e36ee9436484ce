"""transformers' TrainingArguments as rows: every setting that the tools around its Trainer share, and its names of
optimizers and schedules. `interop.trainer` has the rules that read them.

Facts: the docstring of `transformers.TrainingArguments` 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.interop.settings import (
    AT_LEAST,
    Refusal,
    Row,
    all_listed,
    carried,
    file_or_group,
    joint,
    listed,
    number,
    refused,
    text,
    truth,
    whole,
)
from surefoot.interop.shared_rules import switch

_ENGINE = ("parallel.engine", "parallel.zero_stage", "parallel.offload")
_NODES = "is about several processes, which surefoot starts itself"
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
    *all_listed("evaluation keeps sums, not predictions", eval_accumulation_steps=None, batch_eval_metrics=False),
    *all_listed("evaluation keeps sums, not predictions", eval_do_concat_batches=True, include_for_metrics=None),
    *all_listed("evaluation keeps sums, not predictions", prediction_loss_only=False),
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
    carried("max_grad_norm", 1.0, "optim.max_grad_norm", _dropout, null=0.0),
    carried("neftune_noise_alpha", None, "optim.neftune_alpha", _dropout, type=number),
    refused("label_smoothing_factor", 0.0, "surefoot's loss smooths no labels", "leave it out"),
    joint("bf16", False, ("precision.compute",)),
    joint("fp16", False, ("precision.compute",)),
    listed("fp16_opt_level", "O1", "surefoot scales fp16 losses by torch's own means"),
    listed("half_precision_backend", "auto", "surefoot takes torch's own means"),
    *all_listed("evaluation computes as training does", bf16_full_eval=False, fp16_full_eval=False),
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
    *all_listed(_NODES, log_level_replica="warning", log_on_each_node=True),
    listed("disable_tqdm", None, "a pipe gets plain lines"),
    joint("eval_strategy", "no", ("eval_every",), "no evaluates at the end only", type=_strategy),
    joint("eval_steps", None, ("eval_every",), "logging_steps where it is not given", type=number),
    refused("eval_delay", 0.0, "surefoot evaluates from the first time on", "leave it out"),
    carried("eval_on_start", False, "eval_at_start"),
    joint("save_strategy", "steps", ("checkpoint.every",), "the last step is always saved", type=_strategy),
    joint("save_steps", 500, ("checkpoint.every",), type=number),
    joint("save_total_limit", None, ("checkpoint.keep",), f"the best is kept besides; {AT_LEAST}", type=whole),
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
    *all_listed(_LOADING, dataloader_pin_memory=True, dataloader_persistent_workers=False),
    *all_listed(_LOADING, dataloader_prefetch_factor=None, dataloader_multiprocessing_context=None),
    *all_listed(_LOADING, dataloader_in_order=True),
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
    *all_listed(_NODES, ddp_find_unused_parameters=None, ddp_bucket_cap_mb=None, ddp_broadcast_buffers=None),
    *all_listed(_NODES, ddp_static_graph=None, ddp_backend=None, ddp_timeout=1800, local_rank=-1),
    *all_listed(_NODES, accelerator_config=None, eval_use_gather_object=False),
    refused("parallelism_config", None, "surefoot says it with parallel.engine", "leave it out"),
    joint("fsdp", None, _ENGINE, "full_shard and its kin; with offload all of it in host memory"),
    joint("fsdp_config", None, ("parallel.offload", "gradient_checkpointing"), "each word told", type=file_or_group),
    joint("deepspeed", None, _ENGINE, "a JSON file, read word by word: ZeRO stage, offloading", type=file_or_group),
    joint("push_to_hub", False, (), "--push OWNER/NAME, privately"),
    joint("hub_model_id", None, (), "--push OWNER/NAME, privately", type=text),
    listed("hub_token", None, "surefoot takes HF_TOKEN, or `hf auth login`", secret=True),
    listed("hub_private_repo", None, "surefoot uploads privately, and only at the end"),
    *all_listed("surefoot uploads at the end", hub_strategy="every_save", hub_always_push=False),
    listed("hub_revision", None, "surefoot uploads to the main branch"),
    refused("predict_with_generate", False, "surefoot has metrics.names for this", "metrics: {names: [exact_match]}"),
    *all_listed("is about answering, not about training", generation_max_length=None, generation_num_beams=None),
    listed("sortish_sampler", False, "the order of the data depends on the seed alone"),
)  # fmt: skip

ALIASES: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
