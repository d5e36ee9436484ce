"""Flags of accelerate launch, torchrun and deepspeed, and the file that `accelerate config` writes.

Every flag and key either has a reason why a run in one process does not need it, or is refused. Facts: the parsers of
accelerate 1.15 and torch 2.13, against which a test checks the names; DeepSpeed's documented flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.config.dump import shown
from surefoot.interop.faults import setting_error, setting_fault
from surefoot.interop.translation import Note
from surefoot.interop.words import parse_document, plain_truth
from surefoot.system.errors import Fault, InputError


@dataclass(frozen=True)
class Launcher:
    """with_value: flags that take a value. count: flags for processes per machine. machines: flag for machines."""

    name: str
    with_value: frozenset[str]
    count: tuple[str, ...]
    machines: str


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ACCELERATE_OWN = """
aws_access_key_id aws_secret_access_key config_file deepspeed_config_file deepspeed_exclusion_filter deepspeed_hostfile
deepspeed_inclusion_filter deepspeed_moe_layer_cls_names deepspeed_multinode_launcher dynamo_backend dynamo_mode env
gpu_ids gradient_accumulation_steps gradient_clipping log_dir machine_rank main_process_ip main_process_port
main_training_function max_restarts mixed_precision monitor_interval mpirun_hostfile num_cpu_threads_per_process
num_machines num_processes offload_optimizer_device offload_optimizer_nvme_path offload_param_device
offload_param_nvme_path rdzv_backend rdzv_conf role t tee vm zero3_init_flag zero3_save_16bit_model zero_stage
"""
_FSDP = """
activation_checkpointing activation_checkpointing_offload auto_wrap_policy backward_prefetch cpu_ram_efficient_loading
forward_prefetch min_num_params offload_params reshard_after_forward sharding_strategy state_dict_type
sync_module_states transformer_layer_cls_to_wrap use_orig_params version
"""
_FP8 = """
amax_compute_algo amax_history_len backend enable_fsdp_float8_all_gather format interval margin opt_level
override_linear_precision pad_inner_dim
"""
_MEGATRON = """
attention_backend attention_dropout attention_softmax_in_fp32 calculate_per_token_loss context_parallel_size
decoder_last_pipeline_num_layers eod_mask_loss expert_model_parallel_size expert_tensor_parallel_size gradient_clipping
hidden_dropout no_load_optim no_save_optim num_micro_batches optimizer_cpu_offload overlap_cpu_optimizer_d2h_h2d
pp_degree recompute_activations recompute_granularity recompute_method recompute_num_layers sequence_parallelism
tp_degree use_custom_fsdp use_distributed_optimizer use_precision_aware_optimizer use_rotary_position_embeddings
"""
_PARALLEL = """
cp_backend cp_comm_strategy cp_size dp_replicate_size dp_shard_size sp_attn_implementation sp_backend sp_seq_length
sp_seq_length_is_variable sp_size tp_size
"""
_GROUPS = {"fsdp": _FSDP, "fp8": _FP8, "megatron_lm": _MEGATRON, "parallelism_config": _PARALLEL}

# `--fsdp` took the sharding strategy in accelerate's older versions.
ACCELERATE = Launcher(
    "accelerate launch",
    _names(_ACCELERATE_OWN) | {"fsdp"} | {f"{group}_{one}" for group, held in _GROUPS.items() for one in _names(held)},
    ("num_processes",),
    "num_machines",
)
TORCHRUN = Launcher(
    "torchrun",
    _names(
        "nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf role "
        "max_restarts monitor_interval start_method log_dir redirects tee local_addr logs_specs r t "
        "duplicate_stderr_filters duplicate_stdout_filters event_log_handler local_ranks_filter numa_binding "
        "shutdown_timeout signals_to_handle"
    ),
    ("nproc_per_node",),
    "nnodes",
)
DEEPSPEED = Launcher(
    "deepspeed",
    _names(
        "num_gpus num_nodes include exclude master_port master_addr hostfile launcher launcher_args node_rank i e H "
        "min_elastic_nodes max_elastic_nodes autotuning ssh_port bind_core_list save_pid_dir enable_each_rank_log "
        "elastic_training_id_prefix venv_script"
    ),
    ("num_gpus",),
    "num_nodes",
)

OF_THE_LAUNCH = "is about starting processes, which surefoot does itself"
_MEMORY = "shards memory between processes; one process holds everything, and results do not depend on it"
_PROGRAMS_OWN = "the program's own setting decides, as with Trainer"
_RECOMPUTES = "saves memory; surefoot recomputes activations when a run needs it (gradient_checkpointing)"
_DEVICES = "chooses the devices that the run sees"
_PLACES = {
    "node_rank": "NODE_RANK",
    "machine_rank": "NODE_RANK",
    "master_addr": "MASTER_ADDR",
    "main_process_ip": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "main_process_port": "MASTER_PORT",
}
PLACE = "tells several machines which one each is, and where the first one listens"
_REASONS = {
    "mixed_precision": "sets the precision unless the program sets it",
    "num_processes": "one process",
    "nproc_per_node": "one process",
    "num_gpus": "one process",
    "gradient_accumulation_steps": _PROGRAMS_OWN,
    "gradient_clipping": _PROGRAMS_OWN,
    "activation_checkpointing": _RECOMPUTES,
    "activation_checkpointing_offload": _RECOMPUTES,
    "use_deepspeed": _MEMORY,
    "use_fsdp": _MEMORY,
    "zero_stage": _MEMORY,
    "gpu_ids": _DEVICES,
    "include": _DEVICES,
    "i": _DEVICES,
    "use_cpu": "the run sees no accelerator",
    "cpu": "the run sees no accelerator",
    **dict.fromkeys((*_PLACES, "rdzv_endpoint"), PLACE),
}
_REFUSED = {
    "deepspeed_config_file": "holds DeepSpeed settings, which surefoot reads from the program's own deepspeed: FILE",
    "megatron_lm_config": "surefoot has no Megatron",
    "use_megatron_lm": "surefoot has no Megatron",
    "tpu_name": "surefoot does not train on TPUs",
    "tpu": "surefoot does not train on TPUs",
    "no_python": "starts a program that is not Python, which surefoot does not run",
    "run_path": "starts a program by its path, which surefoot does not run",
    "exclude": "excludes devices; surefoot only takes a list of devices to use",
    "e": "excludes devices; surefoot only takes a list of devices to use",
}
_KEYS = _names(
    "compute_environment distributed_type mixed_precision use_cpu debug num_processes machine_rank num_machines "
    "gpu_ids main_process_ip main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity "
    "fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config mpirun_config downcast_bf16 "
    "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env dynamo_config dynamo_backend "
    "ipex_config gradient_accumulation_steps num_cpu_threads_per_process fsdp deepspeed_hostfile"
)
_KINDS = ("NO", "MULTI_GPU", "MULTI_CPU", "DEEPSPEED", "FSDP", "MPS")
_NOTHING = (None, "", "no", "NO", "No", False, "false", "False", [], {})
_LEAVE = "leave it out"


def reason_of(name: str) -> str:
    """Return what a launcher's flag means for a run in one process."""
    plain = name.removeprefix("fsdp_")
    return _REASONS.get(plain, _MEMORY if name.startswith(("fsdp", "zero", "offload_")) else OF_THE_LAUNCH)


def refusal(name: str, value: Any) -> str | None:
    """Return why surefoot cannot do what a flag or key asks for; None if it can, or if the value is off."""
    if value in _NOTHING:
        return None
    if name in _REFUSED:
        return _REFUSED[name]
    if name == "distributed_type" and value not in _KINDS:
        return f"surefoot does not train with {value}"
    if name == "compute_environment" and value != "LOCAL_MACHINE":
        return f"surefoot runs on this machine, not on {value}"
    if name == "mixed_precision" and value not in ("bf16", "fp16"):
        return f"surefoot does not compute in {value}; use bf16, fp16 or no"
    if name in ("dynamo_backend", "dynamo_config.dynamo_backend"):
        return "compilation is enabled with the program's own setting, such as torch_compile: true"
    parallel = name.startswith("parallelism_config") and name.endswith("_size")
    if parallel and value != 1:
        return "surefoot shards weights with parallel.engine only"
    return None


def check(name: str, value: Any, where: str) -> None:
    """Raise InputError if surefoot cannot do what the setting asks for."""
    if (why := refusal(name, value)) is not None:
        raise setting_error(where, why if where.startswith("-") else f"{name}: {why}", _LEAVE)


def read_file(path: str, text: str) -> tuple[dict[str, Any], list[Note]]:
    """Read a file of `accelerate config`: its settings, and a note on each key. Raises InputError with every fault."""
    document = parse_document(text, path)
    faults: list[Fault] = []
    notes: list[Note] = []
    for key, value in _leaves(document.data):
        where = document.where(key)
        group, _, last = key.rpartition(".")
        if not group and key not in _KEYS:
            faults.append(setting_fault(where, f"{key}: unknown setting of accelerate", _LEAVE))
        elif why := refusal(key, value) or refusal(group or key, value) or refusal(last, value):
            faults.append(setting_fault(where, f"{key}: {why}", _LEAVE))
        else:
            meaning = reason_of(last if group != "fsdp_config" or last.startswith("fsdp_") else f"fsdp_{last}")
            reason = _MEMORY if group and meaning == OF_THE_LAUNCH and group != "mpirun_config" else meaning
            reason = "is off or not set" if value in _NOTHING else reason
            notes.append(Note(f"{key}: {shown(value)}", "listed", (), reason, where))
    if faults:
        raise InputError(faults)
    return dict(document.data), notes


def engine(settled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of `parallel` for the sharding that a launcher sets up; empty if there is none."""
    kind = str(settled.get("distributed_type", "")).upper()
    if kind == "DEEPSPEED" or plain_truth(settled.get("use_deepspeed", False)):
        given = {**settled, **(settled.get("deepspeed_config") or {})}
        stage = int(given.get("zero_stage", 2))
        if stage == 0:
            return {"engine": "ddp"}
        whole, moments = (str(given.get(f"offload_{part}_device", "none")) for part in ("param", "optimizer"))
        offload = "all" if whole == "cpu" and stage == 3 else "optimizer" if "cpu" in (whole, moments) else "none"
        return {"engine": "deepspeed", "zero_stage": stage} | ({} if offload == "none" else {"offload": offload})
    if kind == "FSDP" or plain_truth(settled.get("use_fsdp", False)):
        given = {**settled, **(settled.get("fsdp_config") or {})}
        offload = plain_truth(given.get("fsdp_offload_params", False))
        return {"engine": "fsdp2"} | ({"offload": "all"} if offload else {})
    return {}


def place(settled: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that tell a machine its number, and where machine 0 listens."""
    address, _, port = str(settled.get("rdzv_endpoint") or "").rpartition(":")
    found = {"MASTER_ADDR": address, "MASTER_PORT": port}
    found |= {_PLACES[name]: str(value) for name, value in settled.items() if name in _PLACES and value is not None}
    return {name: value for name, value in found.items() if value}


def devices(settled: Mapping[str, Any]) -> str | None:
    """Return CUDA_VISIBLE_DEVICES as the launcher would set it, or None if it does not set it."""
    if any(plain_truth(settled.get(name, False)) for name in ("use_cpu", "cpu")):
        return ""
    chosen = settled.get("include", settled.get("i"))
    if chosen is not None:
        return str(chosen).partition(":")[2] or None
    named = settled.get("gpu_ids")
    return None if named in (None, "", "all") else str(named)


def _leaves(group: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
