"""A command line without what starts it: `NAME=value`, env, uv run, python, accelerate launch, torchrun, deepspeed.

    command = read_command(["CUDA_VISIBLE_DEVICES=0", "accelerate", "launch", "finetune.py", "--lora_r", "8"], options)
    command.program, command.arguments         # "finetune.py", ("--lora_r", "8")

A launcher that asks for more than one process is refused, because one is what surefoot starts: its batch would not
be the one asked for. Nothing here runs anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surefoot.config.yaml_scalars import plain_scalar
from surefoot.dialects.translation import Note
from surefoot.dialects.words import parse_document, plain_truth
from surefoot.errors import Fault, InputError
from surefoot.redaction import hides, redacted

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_BEFORE = ("env", "nohup", "time", "exec", "command")
_RUNNERS = (("uv", "run"), ("poetry", "run"), ("pdm", "run"), ("pipenv", "run"))
_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_PYTHON_WITH_VALUE = ("-X", "-W")
MORE = "start it with one process; training in several comes with a later version"


def no_files(path: str) -> str:
    """`Options.read` where nothing may be read."""
    raise InputError(Fault(path, "cannot be read here"))


@dataclass(frozen=True)
class Options:
    """What a translation may know and ask beside the words themselves.

    allow_unknown: list words that the tool does not know, in place of refusing them. devices: accelerators that a
    launcher which names no number would use. read: the text of a file that a config or command names; InputError
    where it cannot be had.
    """

    allow_unknown: bool = False
    devices: int = 1
    read: Callable[[str], str] = no_files


@dataclass(frozen=True)
class Command:
    """program: as written, a file or the name of a command; the dotted name where `module`. launcher: "" for none.
    facts: what the launcher settles for the program, such as mixed_precision. notes: on the words of the launch."""

    program: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    launcher: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()

    @property
    def name(self) -> str:
        """The file's name without folders, or the module."""
        return self.program if self.module else self.program.rpartition("/")[2]


def read_command(words: Sequence[str], options: Options) -> Command:
    """Take the words that start a program away from those that it gets. Raises InputError."""
    environment: dict[str, str] = {}
    left = list(words)
    while left:
        if assignment := _ASSIGNMENT.fullmatch(left[0]):
            environment[assignment[1]] = assignment[2]
            del left[0]
        elif left[0] in _BEFORE:
            del left[0]
        elif tuple(left[:2]) in _RUNNERS:
            del left[:2]
        else:
            break
    if not left:
        raise InputError(Fault("", "there is no command to read", "give one behind --"))
    notes = tuple(_environment_note(name, value) for name, value in environment.items())
    command = replace(_program(left, environment, options), environment=environment)
    return replace(command, notes=(*notes, *command.notes))


def _program(left: list[str], environment: Mapping[str, str], options: Options) -> Command:
    first = left[0].rpartition("/")[2]
    if first == "accelerate" and left[1:2] == ["launch"]:
        return _launched(_ACCELERATE, left[2:], environment, options)
    if first in ("torchrun", "torch.distributed.run"):
        return _launched(_TORCHRUN, left[1:], environment, options)
    if first == "deepspeed":
        return _launched(_DEEPSPEED, left[1:], environment, options)
    if _PYTHON.fullmatch(left[0]):
        return _python(left[1:], environment, options)
    return Command(left[0], tuple(left[1:]))


def _python(left: list[str], environment: Mapping[str, str], options: Options) -> Command:
    at = 0
    while at < len(left) and left[at].startswith("-") and left[at] not in ("-m", "-c"):
        at += 2 if left[at] in _PYTHON_WITH_VALUE else 1
    left = left[at:]
    if left[:1] == ["-c"]:
        raise InputError(
            Fault("python -c", "is a program of its own, and surefoot runs none", "give the tool's command")
        )
    if not left or left == ["-m"]:
        raise InputError(Fault("python", "names no program", "give the script or module"))
    if left[0] != "-m":
        return Command(left[0], tuple(left[1:]))
    module, rest = left[1], left[2:]
    if module in ("torch.distributed.run", "torch.distributed.launch"):
        return _launched(_TORCHRUN, rest, environment, options)
    if module in ("accelerate.commands.launch", "accelerate"):
        return _launched(_ACCELERATE, rest[1:] if module == "accelerate" else rest, environment, options)
    return Command(module, tuple(rest), module=True)


@dataclass(frozen=True)
class _Launcher:
    """with_value: flags that take a word. count: those of processes (on a machine). machines: of machines."""

    name: str
    with_value: frozenset[str]
    count: tuple[str, ...]
    machines: tuple[str, ...]
    without_effect: frozenset[str]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ACCELERATE = _Launcher(
    "accelerate launch",
    _names(
        "config_file num_processes num_machines machine_rank main_process_ip main_process_port gpu_ids "
        "mixed_precision dynamo_backend dynamo_mode num_cpu_threads_per_process deepspeed_config_file zero_stage "
        "offload_optimizer_device offload_param_device gradient_accumulation_steps gradient_clipping "
        "deepspeed_multinode_launcher deepspeed_hostfile rdzv_backend rdzv_conf same_network max_restarts "
        "monitor_interval role log_dir tee main_training_function downcast_bf16 "
        "fsdp_sharding_strategy fsdp_offload_params fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap "
        "fsdp_state_dict_type fsdp_min_num_params fsdp_backward_prefetch fsdp_version fsdp_cpu_ram_efficient_loading "
        "fsdp_sync_module_states fsdp_use_orig_params fsdp_activation_checkpointing fsdp_reshard_after_forward"
    ),
    ("num_processes",),
    ("num_machines",),
    _names("multi_gpu use_deepspeed use_fsdp"),
)
_TORCHRUN = _Launcher(
    "torchrun",
    _names(
        "nproc_per_node nnodes node_rank master_addr master_port rdzv_backend rdzv_endpoint rdzv_id rdzv_conf role "
        "max_restarts monitor_interval start_method log_dir redirects tee local_addr logs_specs"
    ),
    ("nproc_per_node",),
    ("nnodes",),
    frozenset(),
)
_DEEPSPEED = _Launcher(
    "deepspeed",
    _names(
        "num_gpus num_nodes include exclude master_port master_addr hostfile launcher launcher_args node_rank i e H "
        "min_elastic_nodes max_elastic_nodes autotuning ssh_port bind_core_list"
    ),
    ("num_gpus",),
    ("num_nodes",),
    frozenset(),
)
_MODULE = ("m", "module")


def _launched(launcher: _Launcher, left: Sequence[str], environment: Mapping[str, str], options: Options) -> Command:
    words: dict[str, str] = {}
    notes: list[Note] = []
    module, at = False, 0
    while at < len(left) and left[at].startswith("-"):
        flag, equals, value = left[at].partition("=")
        name = flag.lstrip("-").replace("-", "_")
        shown = left[at]
        if name in _MODULE:
            module = True
        elif equals:
            words[name] = value
        elif name in launcher.with_value:
            if at + 1 == len(left):
                raise InputError(Fault(flag, "has no value", f"write it like {flag} VALUE"))
            words[name] = left[at + 1]
            shown, at = f"{flag} {left[at + 1]}", at + 1
        else:
            words[name] = "true"
        if name not in _MODULE:
            notes.append(Note(shown, "listed", (), _FATES.get(name, _OF_THE_LAUNCH), flag))
        at += 1
    if at == len(left):
        raise InputError(Fault(launcher.name, "starts no program", "name the script behind its flags"))
    settled = _config_file(words, options) if launcher is _ACCELERATE else {}
    settled |= {name: plain_scalar(value) for name, value in words.items()}
    _check_one_process(launcher, settled, environment, options)
    facts = (
        {"mixed_precision": settled["mixed_precision"]} if settled.get("mixed_precision") not in (None, "no") else {}
    )
    return Command(left[at], tuple(left[at + 1 :]), module, {}, launcher.name, facts, tuple(notes))


_OF_THE_LAUNCH = "is about starting processes, and surefoot starts itself"
_FATES = {
    "mixed_precision": "settles the precision where the program itself says nothing",
    "num_processes": "one process",
    "nproc_per_node": "one process",
    "num_gpus": "one process",
}


def _config_file(words: Mapping[str, str], options: Options) -> dict[str, Any]:
    if (path := words.get("config_file")) is None:
        return {}
    return dict(parse_document(options.read(path), path).data)


def _check_one_process(
    launcher: _Launcher, settled: Mapping[str, Any], environment: Mapping[str, str], options: Options
) -> None:
    machines = next((settled[name] for name in launcher.machines if name in settled), 1)
    if str(machines).rpartition(":")[2] != "1":
        raise InputError(Fault(launcher.name, f"asks for {machines} machines, and surefoot starts one process", MORE))
    count = next((settled[name] for name in launcher.count if name in settled), None)
    if count in (None, "gpu", "auto", "xpu"):
        untold = count is None and (launcher is _TORCHRUN or settled.get("distributed_type") == "NO")
        on_cpu = any(plain_truth(settled.get(name, False)) for name in ("use_cpu", "cpu"))
        count = 1 if untold or on_cpu else visible_devices(environment, settled, options)
    elif count == "cpu":
        count = 1
    if str(count) != "1":
        where = next((f"--{name} {count}" for name in launcher.count if name in settled), launcher.name)
        raise InputError(Fault(where, f"asks for {count} processes, and surefoot starts one", MORE))


def visible_devices(environment: Mapping[str, str], settled: Mapping[str, Any], options: Options) -> int:
    """How many accelerators a launcher would use that was told no number."""
    if "include" in settled:
        chosen = str(settled["include"]).partition(":")[2]
    else:
        chosen = str(settled.get("gpu_ids", "all"))
        chosen = environment.get("CUDA_VISIBLE_DEVICES", "") if chosen == "all" else chosen
    named = [one for one in chosen.split(",") if one.strip()]
    return max(1, len(named) or options.devices)


_KNOWN_NAMES = {
    "CUDA_VISIBLE_DEVICES": "set for the run",
    "WANDB_PROJECT": "the project of the W&B run",
}


def _environment_note(name: str, value: str) -> Note:
    shown = f"{name}=…" if hides(name) else redacted(f"{name}={value}")
    return Note(shown, "carried", (), _KNOWN_NAMES.get(name, "set for the run; libraries that know it read it"), name)
