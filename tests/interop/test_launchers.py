"""The flags of launchers are those of their own parsers; every key of accelerate's file has a outcome."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from surefoot.interop import launchers
from surefoot.interop.launch import Options, read_command
from surefoot.interop.llamafactory import tool
from surefoot.system import process
from surefoot.system.errors import InputError


def of_parser(parser) -> tuple[set[str], set[str]]:
    """(flags with a value, switches)"""
    with_value, switches = set(), set()
    for action in parser._actions:
        names = {option.lstrip("-").replace("-", "_") for option in action.option_strings}
        (switches if action.nargs == 0 else with_value).update(names)
    return with_value, switches


def parsers():
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    return [(launchers.ACCELERATE, launch_command_parser()), (launchers.TORCHRUN, get_args_parser())]


@pytest.mark.parametrize("number", [0, 1])
def test_flags_with_a_value_are_those_of_the_launchers_parser(number):
    launcher, parser = parsers()[number]
    with_value, switches = of_parser(parser)
    assert with_value - launcher.with_value == set()
    assert switches & launcher.with_value == set()


def read(text: str, **files: str):
    return read_command(shlex.split(text), Options(read=lambda path: files[path.partition(".")[0]]))


@pytest.mark.parametrize(
    "flag", ["--zero3_init_flag true", "--zero3_save_16bit_model true", "--fsdp full_shard", "--zero_stage 2"]
)
def test_the_word_behind_such_a_flag_is_no_program(flag):
    assert read(f"accelerate launch --num_processes 1 {flag} finetune.py").program == "finetune.py"


def test_every_key_of_accelerates_file_is_known():
    from accelerate.commands.config.config_args import ClusterConfig

    names = {one.name for one in dataclasses.fields(ClusterConfig)}
    assert names - launchers._KEYS == set()


SHARDED = """distributed_type: FSDP
mixed_precision: bf16
num_processes: 1
num_machines: 1
gpu_ids: all
fsdp_config:
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_activation_checkpointing: true
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 4
dynamo_config: {dynamo_backend: "NO"}
"""


def test_each_key_of_the_file_has_a_note():
    command = read("accelerate launch --config_file c.yaml finetune.py", c=SHARDED)
    notes = {note.word.partition(":")[0]: note for note in command.notes}
    assert "fsdp_config.fsdp_sharding_strategy" in notes
    assert notes["deepspeed_config.zero_stage"].where == "c.yaml:10:3"
    assert len(notes) == 11  # the flag itself, and each of the file's ten settings
    assert command.facts == {"mixed_precision": "bf16"}


@pytest.mark.parametrize(
    "line",
    [
        "deepspeed_config: {deepspeed_config_file: x.json}",
        "dynamo_config: {dynamo_backend: INDUCTOR}",
        "mixed_precision: fp8",
        "distributed_type: XLA",
        "parallelism_config: {parallelism_config_tp_size: 2}",
        "megatron_lm_config: {megatron_lm_tp_degree: 2}",
        "learning_rate: 1.0",
    ],
)
def test_what_one_process_cannot_give_is_refused_at_its_line(line):
    with pytest.raises(InputError) as caught:
        read("accelerate launch --config_file c.yaml finetune.py", c=f"num_processes: 1\n{line}\n")
    assert caught.value.faults[0].where.startswith("c.yaml:2")
    read("accelerate launch --config_file c.yaml finetune.py", c="num_processes: 1\n")


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("distributed_type: MULTI_GPU", {}),
        ("distributed_type: FSDP", {"engine": "fsdp2"}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}", {"engine": "fsdp2", "offload": "all"}),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}", {"engine": "deepspeed", "zero_stage": 3}),
        ("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 0}", {"engine": "ddp"}),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}",
            {"engine": "deepspeed", "zero_stage": 2, "offload": "optimizer"},
        ),
    ],
)
def test_how_memory_is_shared_becomes_the_engine(text, engine):
    command = read("accelerate launch --config_file c.yaml finetune.py", c=f"num_processes: 2\n{text}\n")
    assert (command.processes, command.engine) == (2, engine)


def test_flags_of_the_launcher_say_the_engine_too():
    assert read("accelerate launch --use_fsdp --num_processes 2 finetune.py").engine == {"engine": "fsdp2"}
    flags = "--use_deepspeed --zero_stage 3 --offload_param_device cpu"
    asked = {"engine": "deepspeed", "zero_stage": 3, "offload": "all"}
    assert read(f"accelerate launch {flags} --num_processes 2 finetune.py").engine == asked


def test_what_tools_read_from_the_environment_is_handed_to_them():
    counted = {"NNODES", "NPROC_PER_NODE", "MIN_NNODES", "MAX_NNODES", "ALLOW_EXTRA_ARGS", *tool._REFUSED_SWITCHES}
    assert counted <= set(process.LAUNCH_NAMES)
    assert {"WORLD_SIZE", "WANDB_PROJECT", "ACCELERATE_MIXED_PRECISION"} <= set(process.LAUNCH_NAMES)


def test_only_names_that_matter_leave_the_environment(monkeypatch):
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    assert process.launch_environment()["NNODES"] == "2"
    assert "HF_TOKEN" not in process.launch_environment()
