"""Every setting of torchtune's recipes, read flat: its default there, and what becomes of it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.dialects.modules import module_names
from surefoot.dialects.rows import Row, carried, group, joint, listed, number, refused, text, truth, whole

_LIBRARY = "surefoot reads what a model is from its own files"
_MEMORY = "is about memory or speed, and changes no number"
_CUT = "a longer example loses prompt tokens first"

_ROWS: tuple[Row, ...] = (
    carried("output_dir", None, "output", type=text),
    joint("model._component_", None, ("adapter.kind", "precision.base"), type=text),
    joint("model.lora_attn_modules", None, ("adapter.targets",), type=module_names),
    joint("model.apply_lora_to_mlp", False, ("adapter.targets",)),
    refused("model.apply_lora_to_output", False, "surefoot adapts no output head", "use modules_to_save in its config"),
    joint("model.lora_rank", 8, ("adapter.rank",)),
    joint("model.lora_alpha", 16, ("adapter.alpha",), type=number),
    joint("model.lora_dropout", 0.0, ("adapter.dropout",)),
    joint("model.use_dora", False, ("adapter.kind",)),
    joint("model.quantize_base", False, ("precision.base",)),
    listed("tokenizer._component_", None, _LIBRARY),
    listed("tokenizer.path", None, _LIBRARY),
    listed("tokenizer.merges_file", None, _LIBRARY),
    listed("tokenizer.special_tokens_path", None, _LIBRARY),
    carried("tokenizer.max_seq_len", None, "data.max_length", None, _CUT, type=whole),
    refused("tokenizer.prompt_template", None, "surefoot has its own templates", "set data.template in its config"),
    joint("checkpointer._component_", None, ("model.path",), type=text),
    joint("checkpointer.checkpoint_dir", None, ("model.path",), type=text),
    listed("checkpointer.checkpoint_files", None, "surefoot reads all weights of the folder"),
    listed("checkpointer.output_dir", None, "checkpoints lie in the run folder"),
    listed("checkpointer.model_type", None, _LIBRARY),
    listed("checkpointer.safe_serialization", None, "surefoot writes nothing else"),
    listed("checkpointer.recipe_checkpoint", None, "surefoot's checkpoints hold their whole state"),
    refused("checkpointer.adapter_checkpoint", None, "surefoot begins every run with a new adapter", "leave it out"),
    joint("resume_from_checkpoint", False, (), "--resume"),
    listed("save_adapter_weights_only", False, "every checkpoint can be resumed from"),
    joint("dataset._component_", None, ("data.train", "data.format", "data.template"), type=text),
    joint("dataset.source", None, ("data.train",), type=text),
    joint("dataset.data_files", None, ("data.train",), type=text),
    joint("dataset.split", "train", ("data.train",), type=text),
    joint("dataset.name", None, ("data.train",), "the subset", type=text),
    joint("dataset.column_map", None, ("data.train",), type=group),
    joint("dataset.column", "text", ("data.train",), type=text),
    joint("dataset.conversation_column", None, ("data.train",), type=text),
    joint("dataset.conversation_style", None, ("data.format",), type=text),
    joint("dataset.train_on_input", None, ("data.train_on",), type=truth),
    refused("dataset.packed", False, "surefoot does not pack: a step has so many examples", "dataset.packed=False"),
    refused("dataset.new_system_prompt", None, "surefoot writes no system text of its own", "put it into the data"),
    refused("dataset.filter_fn", None, "is code", "filter the data first"),
    carried("seed", None, "seed", type=whole),
    refused("shuffle", True, "every epoch is shuffled by the seed", "leave it out"),
    joint("batch_size", 1, ("batch.micro", "batch.size")),
    joint("gradient_accumulation_steps", 1, ("batch.size",)),
    joint("epochs", 1, ("duration",)),
    joint("max_steps_per_epoch", None, ("duration",), type=whole),
    joint("optimizer._component_", None, ("optim.name",), type=text),
    carried("optimizer.lr", None, "optim.lr", type=number),
    joint("optimizer.weight_decay", None, ("optim.weight_decay",), type=number),
    carried("optimizer.betas", None, "optim.betas"),
    carried("optimizer.eps", None, "optim.eps", type=number),
    carried("optimizer.momentum", None, "optim.momentum", type=number),
    listed("optimizer.fused", None, _MEMORY),
    listed("optimizer.foreach", None, _MEMORY),
    listed("optimizer_in_bwd", False, _MEMORY),
    joint("lr_scheduler._component_", None, ("optim.schedule",), type=text),
    joint("lr_scheduler.num_warmup_steps", 0, ("optim.warmup", "optim.warmup_from_zero")),
    refused("lr_scheduler.num_cycles", 0.5, "surefoot's cosine is half a cycle", "leave it out"),
    joint("loss._component_", None, (), "cross-entropy", type=text),
    listed("loss.num_output_chunks", None, _MEMORY),
    listed("loss.ignore_index", None, "prompts and padding are masked by position"),
    carried("clip_grad_norm", None, "optim.max_grad_norm", type=number),
    joint("compile", False, ("compile",)),
    joint("metric_logger._component_", None, ("report_to",), type=text),
    joint("metric_logger.project", None, ("tracking.project",), type=text),
    joint("metric_logger.name", None, ("tracking.name",), type=text),
    listed("metric_logger.log_dir", None, "logs lie in the run folder"),
    listed("metric_logger.filename", None, "logs lie in the run folder"),
    listed("metric_logger.organize_logs", None, "logs lie in the run folder"),
    carried("log_every_n_steps", 1, "log_every"),
    listed("log_peak_memory_stats", False, "peak memory is always logged"),
    listed("log_level", "INFO", "surefoot's own lines are few"),
    joint("device", "cuda", (), "cpu hides the accelerator", type=text),
    joint("dtype", "bf16", ("precision.compute", "precision.base"), type=text),
    joint("enable_activation_checkpointing", False, ("gradient_checkpointing",)),
    listed("enable_activation_offloading", False, _MEMORY),
    listed("profiler", None, "surefoot train --profile N clocks and traces steps"),
    listed("profiler.enabled", None, "surefoot train --profile N clocks and traces steps"),
    listed("low_cpu_ram", None, _MEMORY),
    listed("custom_sharded_layers", None, "is about several processes, which surefoot starts itself"),
    refused("quantizer", None, "quantisation-aware training is not in surefoot", "leave it out"),
    refused("fsdp_cpu_offload", False, "surefoot says it with parallel.engine", "leave it out"),
    refused("tensor_parallel_dim", 1, "surefoot says it with parallel.engine", "leave it out"),
)  # fmt: skip
ROWS: Mapping[str, Row] = {row.name: row for row in _ROWS}


def last_name(component: Any) -> str:
    return str(component or "").rpartition(".")[2]
