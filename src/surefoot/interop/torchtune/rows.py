"""Rows for the flattened settings of torchtune's recipes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from surefoot.interop.adapters import module_names
from surefoot.interop.settings import (
    Row,
    all_listed,
    by_name,
    carried,
    group,
    joint,
    listed,
    number,
    refused,
    text,
    truth,
    whole,
)
from surefoot.interop.shared_rules import HEAD_NOT_ROUNDED, switch

_LIBRARY = "surefoot reads this from the model's own files"
_MEMORY = "affects memory or speed only, not results"
_CUT = "longer examples lose prompt tokens first"
TRAINABLE = tuple(f"model.{part}_trainable" for part in ("decoder", "encoder", "fusion"))
_SHAPE = ("vocab_size", "num_layers", "num_heads", "num_kv_heads", "embed_dim", "max_seq_len", "intermediate_dim",
          "attn_dropout", "norm_eps", "rope_base", "scale_factor")  # fmt: skip
_SEEING = ("model.image_size", "tokenizer.image_size", "tokenizer.max_num_tiles", "collate_fn")
_TEACHER = {
    **dict.fromkeys(("_component_", "recipe_checkpoint", "model_type"), _LIBRARY),
    "checkpoint_files": "surefoot reads all weights of the folder",
    "output_dir": "it is not saved",
}


def last_name(component: Any) -> str:
    return str(component or "").rpartition(".")[2]


def family(component: Any) -> str:
    """Return the module that the component is in: of torchtune.models.phi3.lora_phi3_mini, phi3."""
    return str(component or "").split(".")[-2:][0]


_DATASET: tuple[Row, ...] = (
    joint("dataset._component_", None, ("data.train", "data.format", "data.template"), type=text),
    joint("dataset.source", None, ("data.train",), type=text),
    joint("dataset.data_files", None, ("data.train",), type=text),
    joint("dataset.split", "train", ("data.train",), type=text),
    joint("dataset.name", None, ("data.train",), "the subset", type=text),
    joint("dataset.subset", None, ("data.train",), "of the_cauldron_dataset", type=text),
    joint("dataset.column_map", None, ("data.train",), type=group),
    joint("dataset.column", "text", ("data.train",), type=text),
    joint("dataset.conversation_column", None, ("data.train",), type=text),
    joint("dataset.conversation_style", None, ("data.format",), type=text),
    joint("dataset.train_on_input", None, ("data.train_on",), type=truth),
    joint("dataset.packed", False, ("batch.row_tokens",)),
    refused(
        "dataset.new_system_prompt",
        None,
        "also replaces the records' own system messages",
        "write system into the source in a surefoot config, for records without one",
    ),
    refused("dataset.filter_fn", None, "is code", "filter the data first"),
)
_ROWS: tuple[Row, ...] = (
    carried("output_dir", None, "output", type=text, required="set it"),
    joint("model._component_", None, ("adapter.kind", "precision.base"), type=text),
    joint("model.lora_attn_modules", None, ("adapter.targets",), type=module_names),
    joint("model.apply_lora_to_mlp", False, ("adapter.targets",)),
    joint("model.apply_lora_to_output", False, ("adapter.targets",)),
    joint("model.lora_rank", 8, ("adapter.rank",)),
    joint("model.lora_alpha", 16, ("adapter.alpha",), type=number),
    joint("model.lora_dropout", 0.0, ("adapter.dropout",)),
    joint("model.use_dora", False, ("adapter.kind",)),
    joint("model.quantize_base", False, ("precision.base",)),
    *all_listed(_LIBRARY, "tokenizer._component_ tokenizer.path tokenizer.merges_file tokenizer.vocab_path "
                "tokenizer.merges_path tokenizer.special_tokens_path"),
    joint("tokenizer.max_seq_len", None, ("data.max_length",), _CUT, type=whole),
    refused("tokenizer.prompt_template", None, "surefoot has its own templates", "set data.template in its config"),
    joint("checkpointer._component_", None, ("model.path",), type=text),
    carried("checkpointer.checkpoint_dir", None, "model.path", type=text, required="name the folder of the model"),
    listed("checkpointer.checkpoint_files", None, "surefoot reads all weights of the folder"),
    listed("checkpointer.output_dir", None, "checkpoints are in the run folder"),
    listed("checkpointer.model_type", None, _LIBRARY),
    listed("checkpointer.safe_serialization", None, "surefoot only writes safetensors"),
    listed("checkpointer.recipe_checkpoint", None, "surefoot's checkpoints hold the whole state"),
    joint("checkpointer.keep_last_n_checkpoints", None, ("checkpoint.keep",), type=whole),
    refused("checkpointer.adapter_checkpoint", None, "surefoot starts every run with a new adapter"),
    joint("resume_from_checkpoint", False, (), "--resume"),
    listed("save_adapter_weights_only", False, "every checkpoint can be resumed from"),
    *_DATASET,
    *(replace(row, name=f"dataset_val.{last_name(row.name)}") for row in _DATASET if row.name != "dataset.packed"),
    refused("dataset_val.packed", False, "surefoot evaluates every example by itself"),
    joint("run_val_every_n_steps", None, ("eval_every",), type=whole),
    listed("batch_size_val", None, "the evaluation loss is a mean over tokens, whatever the batch"),
    carried("seed", None, "seed", type=whole),
    carried("shuffle", True, "data.order", lambda value: "shuffled" if value else "file"),
    joint("batch_size", 1, ("batch.micro", "batch.size")),
    joint("gradient_accumulation_steps", 1, ("batch.size",)),
    joint("epochs", 1, ("duration",)),
    joint("max_steps_per_epoch", None, ("duration",), type=whole),
    joint("optimizer._component_", None, ("optim.name",), type=text),
    carried("optimizer.lr", None, "optim.lr", type=number, required="set it"),
    joint("optimizer.weight_decay", None, ("optim.weight_decay",), type=number),
    carried("optimizer.betas", None, "optim.betas"),
    carried("optimizer.eps", None, "optim.eps", type=number),
    carried("optimizer.momentum", None, "optim.momentum", type=number),
    *all_listed(_MEMORY, "optimizer.fused optimizer.foreach"),
    listed("optimizer_in_bwd", False, _MEMORY),
    joint("lr_scheduler._component_", None, ("optim.schedule",), type=text),
    joint("lr_scheduler.num_warmup_steps", 0, ("optim.warmup", "optim.warmup_from_zero")),
    refused("lr_scheduler.num_cycles", 0.5, "surefoot's cosine is half a cycle"),
    joint("loss._component_", None, ("alignment.loss",), "cross-entropy, or DPOLoss and RSOLoss", type=text),
    joint("loss.beta", 0.1, ("alignment.beta",), "of DPOLoss"),
    joint("loss.gamma", 0.1, ("alignment.beta",), "of RSOLoss"),
    joint("loss.label_smoothing", 0.0, ("alignment.label_smoothing",), "of DPOLoss"),
    joint("ref_checkpointer.checkpoint_dir", None, ("alignment.reference",), "the model itself, or another", type=text),
    *(listed(f"ref_checkpointer.{name}", None, about) for name, about in _TEACHER.items()),
    listed("loss.num_output_chunks", None, _MEMORY),
    listed("teacher_model._component_", None, _LIBRARY),
    listed("teacher_model.lora_attn_modules", None, "an adapter that does not train leaves the teacher as it is"),
    joint("teacher_checkpointer.checkpoint_dir", None, ("stage", "distill.teacher"), type=text),
    *(listed(f"teacher_checkpointer.{name}", None, about) for name, about in _TEACHER.items()),
    joint("kd_loss._component_", None, ("distill.beta",), type=text),
    listed("kd_loss.num_output_chunks", None, _MEMORY),
    joint("kd_ratio", 0.5, ("distill.sft",)),
    *(joint(name, None, ("adapter.targets", "model.trained", "vision"), "texts reach the decoder alone")
      for name in TRAINABLE),
    *all_listed(_LIBRARY, " ".join(f"model.{name}" for name in _SHAPE)),
    *all_listed("belongs to a model that also sees", " ".join(_SEEING)),
    listed("loss.ignore_index", None, "prompts and padding are masked by position"),
    carried("clip_grad_norm", None, "optim.max_grad_norm", type=number),
    carried("compile", False, "compile", lambda on: "default" if on else "off"),
    joint("metric_logger._component_", None, ("report_to",), type=text),
    joint("metric_logger.project", None, ("tracking.project",), type=text),
    joint("metric_logger.name", None, ("tracking.name",), type=text),
    *all_listed("logs are in the run folder", "metric_logger.log_dir metric_logger.filename "
                "metric_logger.organize_logs"),
    carried("log_every_n_steps", 1, "log_every"),
    listed("log_peak_memory_stats", False, "peak memory is always logged"),
    listed("log_level", "INFO", "surefoot prints few lines"),
    joint("device", "cuda", (), "cpu hides the accelerator", type=text),
    joint("dtype", "bf16", ("precision.compute", "precision.base"), type=text, null="fp32"),
    carried("enable_activation_checkpointing", False, "gradient_checkpointing", switch),
    listed("enable_activation_offloading", False, _MEMORY),
    *all_listed("use surefoot train --profile N", "profiler profiler.enabled"),
    listed("low_cpu_ram", None, _MEMORY),
    listed("custom_sharded_layers", None, "is for multi-process launchers; surefoot starts its own processes"),
    joint("quantizer._component_", None, ("precision.qat",), HEAD_NOT_ROUNDED, type=text),
    joint("quantizer.groupsize", 256, ("precision.qat_group_size",), type=whole),
    joint("fake_quant_after_n_steps", None, ("precision.qat_after",), "qat_distributed ignores it", type=whole),
    joint("fsdp_cpu_offload", False, ("parallel.offload",)),
    listed("fsdp_reshard_after_forward", True, _MEMORY),
    listed("fsdp.cpu_offload", None, "torchtune reads fsdp_cpu_offload instead"),
    joint("tensor_parallel_dim", 1, ("batch.size", "parallel.nproc"), "processes that divide one batch"),
    listed("tensor_parallel_plan", None, "belongs to tensor_parallel_dim"),
    listed("data_parallel_shard_dim", -1, "surefoot shards over all processes"),
    listed("data_parallel_replicate_dim", 1, "surefoot shards over all processes"),
)  # fmt: skip
ROWS: Mapping[str, Row] = by_name(*_ROWS)
