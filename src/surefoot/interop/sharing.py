"""Translate Trainer's sharding settings (`deepspeed: FILE.json`, `fsdp:`, `fsdp_config:`) to `parallel`.

    set_sharing(draft, TRAINER)      # after batch, optimizer and precision are set

Trainer fills in the "auto" values of a DeepSpeed file and rejects a file whose numbers differ from its own. So numbers
are compared here, and the run takes only the ZeRO stage and offloading from the file. With one process nothing is
sharded and each key is listed with that reason; the file is still read, so that mistakes in it are found. Facts:
DeepSpeed's configuration page, and transformers' `HfTrainerDeepSpeedConfig`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.config.dump import shown
from surefoot.interop import launchers
from surefoot.interop.draft import Draft
from surefoot.interop.translation import Note
from surefoot.interop.words import parse_document, plain_truth
from surefoot.system.errors import InputError
from surefoot.system.messages import did_you_mean

_ALONE = "one process holds everything; results do not depend on it"
_ENGINE = ("parallel.engine", "parallel.zero_stage", "parallel.offload")
_FSDP = ("full_shard", "shard_grad_op", "hybrid_shard", "hybrid_shard_zero2", "no_shard", "offload", "auto_wrap")
_FSDP_LISTED = (
    "version", "min_num_params", "transformer_layer_cls_to_wrap", "auto_wrap_policy", "backward_prefetch",
    "backward_prefetch_policy", "forward_prefetch", "limit_all_gathers", "use_orig_params", "sync_module_states",
    "cpu_ram_efficient_loading", "cpu_offload_pin_memory", "state_dict_type", "final_state_dict_type",
    "save_state_dict_type", "reshard_after_forward", "xla_fsdp_settings", "xla_fsdp_grad_ckpt", "param_dtype",
    "mixed_precision_policy",
)  # fmt: skip
_FSDP_READ = ("offload_params", "cpu_offload", "activation_checkpointing", "sharding_strategy", "xla")
_WRAPS = "surefoot wraps every decoder layer, and results do not depend on it"


@dataclass(frozen=True)
class Names:
    """A tool's names for the settings that a DeepSpeed file repeats. implied: fsdp_config alone enables FSDP."""

    micro: str
    accumulation: str
    optimizer: str
    schedule: str
    implied: bool = False


TRAINER = Names("per_device_train_batch_size", "gradient_accumulation_steps", "optim", "lr_scheduler_type")


def set_sharing(draft: Draft, names: Names = TRAINER) -> None:
    """Set `parallel` and account for the keys of the DeepSpeed or FSDP files."""
    deepspeed, fsdp = draft["deepspeed"], draft["fsdp"] or (names.implied and bool(draft["fsdp_config"]))
    if deepspeed and fsdp:
        draft.refuse("fsdp", "deepspeed already shards memory", "keep one")
    _read_fsdp(draft, fsdp)
    if deepspeed and (settings := _file(draft, "deepspeed", deepspeed)) is not None:
        _read_deepspeed(draft, settings, names)


def _file(draft: Draft, name: str, value: Any) -> Mapping[str, Any] | None:
    """Return inline settings or those of a file; None after noting a fault if they cannot be read."""
    if isinstance(value, dict):
        return value
    try:
        return parse_document(draft.options.read(str(value)), str(value)).data
    except InputError as error:
        for fault in error.faults:
            draft.refuse(name, f"{fault.where} {fault.what}" if fault.where == value else str(fault), fault.fix)
        return None


def _share(draft: Draft, name: str, engine: Mapping[str, Any], why: str = "") -> None:
    """Write keys of `parallel` if there are several processes."""
    count = draft.processes
    if count == 1:
        draft.drop(_ALONE, name)
        return
    draft.set("parallel.nproc", count, why="as many processes share a step")
    for key, value in engine.items():
        draft.set(f"parallel.{key}", value, name, why=why)


class _FileWords:
    """Notes on the keys of a file that a setting names."""

    def __init__(self, draft: Draft, name: str):
        self.draft, self.name = draft, name
        self.file = draft[name] if isinstance(draft[name], str) else name

    def listed(self, key: str, value: Any, why: str) -> None:
        self._note(key, value, "listed", why)

    def carried(self, key: str, value: Any, *keys: str, why: str = "") -> None:
        self._note(key, value, "changed" if why else "carried", why, *keys)

    def refuse(self, key: str, what: str, fix: str) -> None:
        self.draft.refuse(self.name, f"{self.file}: {key}: {what}", fix)

    def _note(self, key: str, value: Any, outcome: Any, why: str, *keys: str) -> None:
        self.draft.add_note(Note(f"{key}: {shown(value)}", outcome, keys, why, str(self.file)))


def _read_deepspeed(draft: Draft, settings: Mapping[str, Any], names: Names) -> None:
    inside, words = _FileWords(draft, "deepspeed"), dict(leaves(settings))
    zero = {key.rpartition("zero_optimization.")[2]: value for key, value in words.items()}
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        inside.refuse("zero_optimization.stage", f"DeepSpeed has no stage {shown(stage)}", "use 0, 1, 2 or 3")
        return
    plugin: dict[str, Any] = {"zero_stage": stage}
    for part, old in (("optimizer", "cpu_offload"), ("param", "cpu_offload_params")):
        device = "cpu" if plain_truth(zero.get(old, False)) else zero.get(f"offload_{part}.device", "none")
        plugin[f"offload_{part}_device"] = device
        if device not in ("cpu", "none", None):
            what = f"surefoot keeps shards on the device or in host memory, not on {device}"
            inside.refuse(f"zero_optimization.offload_{part}.device", what, "use cpu or none")
    _share(draft, "deepspeed", launchers.engine({"distributed_type": "DEEPSPEED", "deepspeed_config": plugin}))
    expected = _expected(draft, names)
    for key, value in words.items():
        group, _, name = key.rpartition(".")
        # The name is checked before the group: older files have unsupported keys in other groups.
        if name in REFUSED:
            if is_off(value):
                inside.listed(key, value, "is off or not set")
            else:
                inside.refuse(key, REFUSED[name], "leave it out")
        elif name in LISTED.get(group, {}):
            inside.listed(key, value, LISTED[group][name])
        elif (fix := unknown(key)) is not None:
            inside.refuse(key, "unknown setting of DeepSpeed", fix)
        elif group.startswith("zero_optimization"):
            if draft.written("parallel.engine") is not None:
                inside.carried(key, value, *_ENGINE)
            else:
                inside.listed(key, value, _ALONE)
        elif key == "bf16.enabled" and plain_truth(value) and draft.written("precision.compute") == "auto":
            draft.set("precision.compute", "bf16", "deepspeed")  # the tool's own auto resolves to bf16 with such a file
            inside.carried(key, value, "precision.compute")
        elif key in expected:
            _compare(inside, key, value, *expected[key])
        elif key == "optimizer.type":
            _check_optimizer(draft, inside, value, names)
        elif key == "scheduler.type":
            _set_schedule(draft, inside, value)
        elif key.startswith("scheduler.") and (value in ("auto", 0) or name == "warmup_num_steps"):
            _check_rise(draft, inside, key, value)
        else:
            fix = "write auto, and use the tool's own setting"
            inside.refuse(key, f"surefoot's schedule cannot use {shown(value)}", fix)


def _expected(draft: Draft, names: Names) -> dict[str, tuple[Any, str]]:
    """Return key of the file -> (value of the tool's own setting, surefoot key)."""
    micro, passes = draft[names.micro], draft[names.accumulation]
    compute = draft.written("precision.compute")
    betas = [draft["adam_beta1"], draft["adam_beta2"]]
    return {
        "train_micro_batch_size_per_gpu": (micro, "batch.micro"),
        "gradient_accumulation_steps": (passes, "batch.size"),
        "train_batch_size": (micro * passes * draft.processes, "batch.size"),
        "gradient_clipping": (draft["max_grad_norm"], "optim.max_grad_norm"),
        "bf16.enabled": (compute == "bf16", "precision.compute"),
        "fp16.enabled": (compute == "fp16", "precision.compute"),
        "optimizer.params.lr": (draft["learning_rate"], "optim.lr"),
        "optimizer.params.betas": (betas, "optim.betas"),
        "optimizer.params.eps": (draft["adam_epsilon"], "optim.eps"),
        "optimizer.params.weight_decay": (draft["weight_decay"], "optim.weight_decay"),
    }


def _compare(inside: _FileWords, key: str, value: Any, wanted: Any, ours: str) -> None:
    if value == "auto" or _same(value, wanted):
        inside.carried(key, value, ours)
    else:
        what = f"is {shown(value)}, but the other settings say {shown(wanted)}"
        inside.refuse(key, what, "write auto")


def _same(value: Any, wanted: Any) -> bool:
    if isinstance(value, list) and isinstance(wanted, list):
        return len(value) == len(wanted) and all(map(_same, value, wanted))
    if isinstance(value, int | float) and isinstance(wanted, int | float) and not isinstance(value, bool):
        return math.isclose(value, wanted)
    return value == wanted


def _check_optimizer(draft: Draft, inside: _FileWords, value: Any, names: Names) -> None:
    ours = OPTIMIZERS.get(str(value).lower())
    if ours is None:
        inside.refuse("optimizer.type", f"surefoot has no {value} of DeepSpeed's", "leave optimizer out, or use AdamW")
    elif draft.written("optim.name") not in (None, ours):
        what = f"is {value}, but {names.optimizer} is {draft[names.optimizer]}"
        inside.refuse("optimizer.type", what, "leave optimizer out")
    else:
        inside.carried("optimizer.type", value, "optim.name")


def _set_schedule(draft: Draft, inside: _FileWords, value: Any) -> None:
    """Set optim.schedule from DeepSpeed's scheduler, which overrides the tool's. Its default warm-up is logarithmic."""
    ours = SCHEDULERS.get(str(value))
    if ours is None:
        fix = f"leave scheduler out, or use {', '.join(SCHEDULERS)}"
        inside.refuse("scheduler.type", f"surefoot has no {value}", fix)
        return
    draft.set("optim.schedule", ours, "deepspeed", why="scheduler.type overrides the tool's own schedule")
    inside.carried("scheduler.type", value, "optim.schedule", why="warm-up is linear here")


def _check_rise(draft: Draft, inside: _FileWords, key: str, value: Any) -> None:
    if value in ("auto", 0) or value == draft["warmup_steps"]:
        inside.carried(key, value, "optim.warmup" if "warmup" in key else "optim.schedule")
    else:
        what = f"is {shown(value)}, but warmup_steps is {shown(draft['warmup_steps'])}"
        inside.refuse(key, what, "write auto, and give warmup_steps")


def _read_fsdp(draft: Draft, requested: Any) -> None:
    config = draft["fsdp_config"]
    if not requested or requested in ("none", "no"):
        draft.drop("is off or not set", "fsdp")
        draft.drop("fsdp is off", "fsdp_config")
        return
    word = "fsdp" if draft.given("fsdp") else "fsdp_config"
    options = (
        ["full_shard"] if requested is True else requested if isinstance(requested, list) else str(requested).split()
    )
    options = [str(option) for option in options]
    if unknown := next((option for option in options if option not in _FSDP), None):
        fix = did_you_mean(unknown, _FSDP, f"choose from {', '.join(_FSDP)}")
        draft.refuse("fsdp", f"transformers has no {unknown}", fix)
        draft.drop("fsdp is refused", "fsdp_config")
        return
    settings = {} if not config else _file(draft, "fsdp_config", config)
    words = {name.removeprefix("fsdp_"): value for name, value in (settings or {}).items()}
    _account_fsdp(draft, words)
    strategy = str(words.get("sharding_strategy") or next((one for one in options if "shard" in one), "full_shard"))
    offload = "offload" in options or any(plain_truth(words.get(name, False)) for name in _FSDP_READ[:2])
    if strategy.lower() in ("no_shard", "3"):
        _share(draft, word, {"engine": "ddp"})
    else:
        whole = strategy.lower() in ("full_shard", "1")
        why = "" if whole else f"{strategy} keeps more on each device; surefoot shards all weights"
        _share(draft, word, {"engine": "fsdp2", **({"offload": "all"} if offload else {})}, why)
    draft.note("fsdp_config", "carried" if words else "listed", "its keys are listed below" if words else "is empty")


def _account_fsdp(draft: Draft, words: Mapping[str, Any]) -> None:
    inside = _FileWords(draft, "fsdp_config")
    known: Sequence[str] = (*_FSDP_READ, *_FSDP_LISTED)
    for name, value in words.items():
        if name not in known:
            inside.refuse(name, "unknown setting of FSDP", did_you_mean(name, known, "leave it out"))
        elif name == "xla" and value:
            inside.refuse(name, "surefoot does not train with XLA", "leave it out")
        elif name == "activation_checkpointing" and value:
            draft.set("gradient_checkpointing", "on", "fsdp_config")
            draft.note("gradient_checkpointing", "carried", "fsdp_config turns it on as well")
            inside.carried(name, value, "gradient_checkpointing")
        elif name in _FSDP_READ[:2] and value and draft.processes > 1:
            inside.carried(name, value, "parallel.offload")
        else:
            inside.listed(name, value, _WRAPS if value not in (None, False) else "is off or not set")


OPTIMIZERS = {"adamw": "adamw", "adam": "adamw", "fusedadam": "adamw", "deepspeedcpuadam": "adamw", "adagrad": None}
SCHEDULERS = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_ON_SPEED = "affects how ranks store and exchange their shards, not results"
_TELLS = "is about DeepSpeed's logs; surefoot logs its own measurements"
_SCALING = "surefoot has its own fp16 loss scaling"
_NOT_USED = "belongs to a component that surefoot replaces"

# Group -> keys that do not change results -> why. The empty group is the top level of the file.
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
         "check_grad_overflow"), "trained weights are kept in fp32 here"),
    "optimizer": {"legacy_fusion": _NOT_USED},
    "optimizer.params": {"torch_adam": _NOT_USED, "adam_w_mode": _NOT_USED, "bias_correction": _NOT_USED,
                         "max_grad_norm": _NOT_USED},
    "scheduler": {},
    "scheduler.params": {"warmup_type": "warm-up is linear here", "last_batch_iteration": _NOT_USED},
}  # fmt: skip
# Keys that surefoot does not support unless they are off.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("zero_quantized_weights", "zero_quantized_gradients", "zero_quantized_nontrainable_weights"),
                    "surefoot communicates without quantization"),
    "amp": "surefoot does not support apex's amp; use bf16 or fp16",
    **dict.fromkeys(
        ("sparse_attention", "progressive_layer_drop", "curriculum_learning", "data_efficiency", "compression_training",
         "elasticity", "autotuning", "quantize_training", "eigenvalue", "hybrid_engine", "pipeline", "tensor_parallel",
         "sequence_parallel_size", "pld", "weight_quantization", "sparse_gradients"),
        "surefoot does not support this part of DeepSpeed"),
}  # fmt: skip
# Keys that a rule compares or carries over, listed so that any other key is reported as unknown.
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
ALIASES = {"bfloat16": "bf16"}  # DeepSpeed reads both


def leaves(group: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) in the order of the file, descending into known groups."""
    for name, value in group.items():
        key = f"{path}.{ALIASES.get(name, name)}".lstrip(".")
        if key in GROUPS and isinstance(value, dict):
            yield from leaves(value, key)
        else:
            yield key, value


def is_off(value: Any) -> bool:
    """Return whether a value is off: absent, false, 0 or 1 of something, auto, none, or a group that is not enabled."""
    if isinstance(value, dict):
        return not value or plain_truth(value.get("enabled", True)) is False
    return value is not True and value in (None, False, 0, 1, "", "auto", "none")


def unknown(key: str) -> str | None:
    """Return the fix for a key that DeepSpeed is not known to have; None for a known key."""
    group, _, name = key.rpartition(".")
    known = (*READ.get(group, ()), *LISTED.get(group, ()), *REFUSED, *(one.rpartition(".")[2] for one in GROUPS))
    if name in READ.get(group, ()) or name in LISTED.get(group, ()) or name in REFUSED:
        return None
    return did_you_mean(name, known, "leave it out")
