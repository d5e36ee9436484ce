"""What starts a program is taken away; more than one process is refused."""

from __future__ import annotations

import shlex

import pytest

from surefoot.dialects.launch import Options, read_command
from surefoot.errors import InputError

FILES = {
    "one.yaml": "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\nnum_machines: 1\n",
    "four.yaml": "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 4\nnum_machines: 1\n",
}


def read(text: str, devices: int = 1):
    return read_command(shlex.split(text), Options(devices=devices, read=FILES.__getitem__))


@pytest.mark.parametrize(
    ("text", "program", "arguments"),
    [
        ("llamafactory-cli train x.yaml", "llamafactory-cli", ("train", "x.yaml")),
        ("python finetune.py --r 8", "finetune.py", ("--r", "8")),
        ("python3.11 -u -W ignore finetune.py --r 8", "finetune.py", ("--r", "8")),
        ("env A=1 uv run python finetune.py", "finetune.py", ()),
        ("python -m llamafactory.cli train x.yaml", "llamafactory.cli", ("train", "x.yaml")),
        ("accelerate launch --config_file one.yaml finetune.py --r 8", "finetune.py", ("--r", "8")),
        ("accelerate launch --num_processes=1 -m trl sft", "trl", ("sft",)),
        ("torchrun --nproc_per_node 1 --master_port 29500 finetune.py a", "finetune.py", ("a",)),
        ("torchrun --nproc-per-node=1 --standalone finetune.py", "finetune.py", ()),
        ("torchrun finetune.py", "finetune.py", ()),
        ("deepspeed --num_gpus 1 finetune.py --deepspeed x.json", "finetune.py", ("--deepspeed", "x.json")),
        ("deepspeed --include localhost:3 finetune.py", "finetune.py", ()),
        ("python -m torch.distributed.run --nproc_per_node 1 finetune.py", "finetune.py", ()),
        ("CUDA_VISIBLE_DEVICES=2 torchrun --nproc_per_node gpu finetune.py", "finetune.py", ()),
    ],
)
def test_the_program_and_its_words(text, program, arguments):
    command = read(text)
    assert (command.program, command.arguments) == (program, arguments)


@pytest.mark.parametrize(
    ("text", "devices", "named"),
    [
        ("torchrun --nproc_per_node 4 finetune.py", 1, "--nproc_per_node 4"),
        ("torchrun --nnodes 2 --nproc_per_node 1 finetune.py", 1, "2 machines"),
        ("torchrun --nproc_per_node gpu finetune.py", 8, "8 processes"),
        ("accelerate launch --config_file four.yaml finetune.py", 1, "4 processes"),
        ("accelerate launch finetune.py", 2, "2 processes"),
        ("accelerate launch --gpu_ids 0,1 finetune.py", 8, "2 processes"),
        ("deepspeed finetune.py", 8, "8 processes"),
        ("deepspeed --include localhost:0,1 finetune.py", 8, "2 processes"),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed finetune.py", 8, "2 processes"),
    ],
)
def test_several_processes_are_refused(text, devices, named):
    with pytest.raises(InputError, match=named) as caught:
        read(text, devices)
    assert "later version" in str(caught.value)


def test_a_word_on_the_line_goes_before_the_config_file():
    assert read("accelerate launch --config_file four.yaml --num_processes 1 finetune.py").facts == {
        "mixed_precision": "bf16"
    }


def test_the_environment_is_kept_and_its_secrets_are_not_shown():
    command = read("WANDB_PROJECT=demo HF_TOKEN=hf_abcdefghijk python finetune.py")
    assert command.environment == {"WANDB_PROJECT": "demo", "HF_TOKEN": "hf_abcdefghijk"}
    assert [note.word for note in command.notes] == ["WANDB_PROJECT=demo", "HF_TOKEN=…"]


@pytest.mark.parametrize("text", ["", "A=1", "python", "python -m", "torchrun --nproc_per_node 1", "python -c 'x = 1'"])
def test_no_program_is_an_error(text):
    with pytest.raises(InputError):
        read(text)
