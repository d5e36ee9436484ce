"""What a JSON file of DeepSpeed's holds, word by word, and what becomes of each.

transformers' Trainer fills its "auto" words in and refuses a file whose numbers are others than its own; so numbers are
compared here, and the ZeRO stage with its offloading is what a run takes from the file. Facts: DeepSpeed's page on its
configuration, and transformers' `HfTrainerDeepSpeedConfig`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.interop.words import plain_truth
from surefoot.system.messages import nearest_word

OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "adagrad": None}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ON_SPEED = "is about how ranks exchange and keep their shares, and changes no number"
_TELLS = "is about what DeepSpeed writes; surefoot's log has its own figures"
_SCALING = "surefoot scales fp16 losses in its own way"
_NOT_USED = "belongs to a part that surefoot takes the place of"

# Group -> words that change no number -> why. The empty group is the file itself.
LISTED: Mapping[str, Mapping[str, str]] = {
    "": {
        **dict.fromkeys(
            ("steps_per_print", "wall_clock_breakdown", "dump_state", "memory_breakdown", "tensorboard", "wandb",
             "csv_monitor", "comet", "monitor_config", "comms_logger", "flops_profiler", "timers"), _TELLS),
        **dict.fromkeys(
            ("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients",
             "gradient_predivide_factor", "communication_data_type", "data_types", "aio", "checkpoint",
             "activation_checkpointing", "disable_allgather", "dataloader_drop_last",
             "use_data_before_expert_parallel_", "graph_harvesting", "compile"), _ON_SPEED),
    },
    "zero_optimization": dict.fromkeys(
        ("overlap_comm", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size", "allgather_partitions",
         "reduce_scatter", "round_robin_gradients", "sub_group_size", "prefetch_bucket_size", "max_live_parameters",
         "max_reuse_distance", "param_persistence_threshold", "model_persistence_threshold",
         "gather_16bit_weights_on_model_save", "stage3_prefetch_bucket_size", "stage3_max_live_parameters",
         "stage3_max_reuse_distance", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
         "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
         "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params", "ignore_unused_parameters",
         "legacy_stage1", "elastic_checkpoint", "load_from_fp32_weights", "memory_efficient_linear",
         "zero_hpz_partition_size", "mics_shard_size", "mics_hierarchical_params_gather",
         "use_multi_rank_bucket_allreduce", "override_module_apply", "log_trace_cache_warnings",
         "pipeline_loading_checkpoint", "cpu_offload_use_pin_memory", "grad_hooks",
         "enable_sanity_checks", "cpu_offload_params_pin_memory", "zeropp_loco_param"), _ON_SPEED),
    "zero_optimization.offload_optimizer": dict.fromkeys(
        ("pin_memory", "buffer_count", "fast_init", "ratio", "pipeline_read", "pipeline_write", "pipeline", "nvme_path",
         "buffer_size", "max_in_cpu"), _ON_SPEED),
    "zero_optimization.offload_param": dict.fromkeys(
        ("pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path"), _ON_SPEED),
    "fp16": dict.fromkeys(
        ("auto_cast", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
         "consecutive_hysteresis", "min_loss_scale", "fp16_master_weights_and_grads"), _SCALING),
    "bf16": dict.fromkeys(
        ("immediate_grad_update", "bf16_master_weights_and_grads", "bf16_optimizer_states",
         "check_grad_overflow"), "weights that train are held in fp32 here"),
    "optimizer": {"legacy_fusion": _NOT_USED},
    "optimizer.params": {"torch_adam": _NOT_USED, "adam_w_mode": _NOT_USED, "bias_correction": _NOT_USED,
                         "max_grad_norm": _NOT_USED},
    "scheduler": {},
    "scheduler.params": {"warmup_type": "rises in a straight line here", "last_batch_iteration": _NOT_USED},
}  # fmt: skip
# Words that ask for what surefoot lacks, unless they are off.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
                    "surefoot exchanges numbers as they are, unquantised"),
    "amp": "apex's amp is not in surefoot: bf16 or fp16",
    **dict.fromkeys(
        ("sparse_attention", "progressive_layer_drop", "curriculum_learning", "data_efficiency", "compression_training",
         "elasticity", "autotuning", "quantize_training", "eigenvalue", "hybrid_engine", "pipeline", "tensor_parallel",
         "sequence_parallel_size", "pld", "weight_quantization", "sparse_gradients"),
        "surefoot does not have this part of DeepSpeed"),
}  # fmt: skip
# Words that a rule compares or carries over; here only so that the others are known to be unknown.
READ: Mapping[str, tuple[str, ...]] = {
    "": ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    "zero_optimization": ("stage", "cpu_offload", "cpu_offload_params"),
    "zero_optimization.offload_optimizer": ("device",),
    "zero_optimization.offload_param": ("device",),
    "fp16": ("enabled",),
    "bf16": ("enabled",),
    "optimizer": ("type",),
    "optimizer.params": ("lr", "betas", "eps", "weight_decay"),
    "scheduler": ("type",),
    "scheduler.params": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "cos_min_ratio",
                         "warmup_min_ratio"),
}  # fmt: skip
GROUPS = tuple(group for group in READ if group)
ALIASES = {"bfloat16": "bf16"}


def leaves(group: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted word, value) of a file, groups that are known opened, in the order of the file."""
    for name, value in group.items():
        key = f"{path}.{ALIASES.get(name, name)}".lstrip(".")
        if key in GROUPS and isinstance(value, dict):
            yield from leaves(value, key)
        else:
            yield key, value


def is_off(value: Any) -> bool:
    """Whether a word asks for nothing: absent, false, 0 or 1 of something, or a group that is not enabled."""
    if isinstance(value, dict):
        return not value or plain_truth(value.get("enabled", True)) is False
    return value is not True and value in (None, False, 0, 1, "", "auto", "none")


def unknown(key: str) -> str | None:
    """What to say of a word that DeepSpeed does not have, as far as surefoot knows; None for one that it has."""
    group, _, name = key.rpartition(".")
    known = (*READ.get(group, ()), *LISTED.get(group, ()), *REFUSED, *(one.rpartition(".")[2] for one in GROUPS))
    if name in known and (name in READ.get(group, ()) or name in LISTED.get(group, ()) or name in REFUSED):
        return None
    near = nearest_word(name, known)
    return f"did you mean {near}?" if near else "leave it out"
