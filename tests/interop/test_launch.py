"""What starts a program is taken away; how many processes it starts is kept."""

from __future__ import annotations

import shlex

import pytest

from helpers.faults import refused_settings
from surefoot.interop.launch import Options, no_files, read_command
from surefoot.interop.registry import translate_command
from surefoot.system.errors import InputError

FILES = {
    "one.yaml": "distributed_type: 'NO'\nmixed_precision: bf16\nnum_processes: 1\nnum_machines: 1\n",
    "two.yaml": "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 2\nmachine_rank: 1\n"
    "main_process_ip: 10.0.0.1\nmain_process_port: 29501\n",
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
    ("text", "devices", "count"),
    [
        ("torchrun --nproc_per_node 4 finetune.py", 1, 4),
        ("torchrun --nproc_per_node gpu finetune.py", 8, 8),
        ("accelerate launch --config_file four.yaml finetune.py", 1, 4),
        ("accelerate launch finetune.py", 2, 2),
        ("accelerate launch --gpu_ids 0,1 finetune.py", 8, 2),
        ("deepspeed finetune.py", 8, 8),
        ("deepspeed --include localhost:0,1 finetune.py", 8, 2),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed finetune.py", 8, 2),
        ("torchrun finetune.py", 8, 1),
    ],
)
def test_several_processes_are_counted(text, devices, count):
    command = read(text, devices)
    assert command.processes == count
    assert command.facts.get("processes", 1) == count


PLACE = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
SETTING, COMMAND = "SF-TRANSLATE-SETTING", "SF-TRANSLATE-COMMAND"


@pytest.mark.parametrize(
    "text",
    [
        "torchrun --nnodes 2 --nproc_per_node 4 --node_rank 1 --master_addr 10.0.0.1 --master_port 29501 f.py",
        "torchrun --nnodes 2:2 --nproc_per_node 4 --node_rank 1 --rdzv_endpoint 10.0.0.1:29501 f.py",
        "accelerate launch --num_machines 2 --num_processes 8 --machine_rank 1 --main_process_ip 10.0.0.1 "
        "--main_process_port 29501 f.py",
        "accelerate launch --config_file two.yaml f.py",
    ],
)
def test_several_machines_have_as_many_processes_each(text):
    command = read(text)
    assert (command.processes, command.machines) == (8, 2)
    assert {name: command.environment.get(name) for name in PLACE} == PLACE


def test_one_machine_gets_no_place():
    command = read("torchrun --nproc_per_node 2 --master_port 29501 --node_rank 0 f.py")
    assert command.machines == 1
    assert not PLACE.keys() & command.environment.keys()


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("torchrun --nnodes 1:4 --nproc_per_node 1 finetune.py", SETTING, "--nnodes"),
        ("torchrun --nnodes many finetune.py", SETTING, "--nnodes"),
        ("deepspeed --num_nodes 2 --num_gpus 8 finetune.py", COMMAND, "deepspeed"),
    ],
)
def test_machines_that_are_not_known_or_started_by_ssh_are_left_to_the_launcher(text, code, where):
    with pytest.raises(InputError) as caught:
        read(text, 1)
    (fault,) = caught.value.faults
    assert (fault.code, fault.where) == (code, where)
    assert "docs/several-processes.md" in fault.fix


TWO = "NNODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29501"
BATCH = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4"
TUNED = "llamafactory-cli train --model_name_or_path m --stage sft --do_train --dataset d --template alpaca"
FINETUNE = "finetune.py --base_model m --data_path d.json"


@pytest.mark.parametrize(
    ("before", "devices"),
    [
        (f"{TWO} NPROC_PER_NODE=4 FORCE_TORCHRUN=1 llamafactory-cli train", 1),
        (f"{TWO} llamafactory-cli train", 4),
        ("torchrun --nnodes 2 --node_rank 1 --nproc_per_node 4 --rdzv_endpoint 10.0.0.1:29501 src/train.py", 1),
    ],
)
def test_the_machines_of_a_tool_share_the_step(before, devices):
    words = f"{before} {TUNED.partition('train ')[2]} {BATCH}"
    found = translate_command(shlex.split(words), Options(devices=devices))
    assert found.config["parallel"] == {"nproc": 4, "machines": 2}
    assert found.config["batch"]["size"] == 2 * 4 * 8
    assert {name: found.environment.get(name) for name in PLACE} == PLACE


def test_llamafactory_counts_machines_only_where_it_starts_torchrun():
    found = told(f"{TWO} {TUNED} {BATCH}", {})
    assert "parallel" not in found.config
    assert found.config["batch"]["size"] == 8


def test_processes_that_machines_cannot_share_evenly_are_refused():
    words = f"accelerate launch --num_machines 2 --num_processes 3 --machine_rank 0 {FINETUNE}"
    with pytest.raises(InputError) as caught:
        told(words, {})
    assert [fault.code for fault in caught.value.faults] == [COMMAND]


PER_DEVICE = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4"


def test_a_launchers_processes_become_surefoots_and_the_batch_is_the_one_asked_for():
    trainer = f"sft.py --model_name_or_path m --dataset_name d --output_dir o {PER_DEVICE}"
    two = told(f"torchrun --nproc_per_node 2 {trainer}", {}).config
    assert two["parallel"] == {"nproc": 2}
    assert two["batch"] == {"size": 16, "micro": 2}
    assert "parallel" not in told(trainer, {}).config
    assert told(trainer, {}).config["batch"]["size"] == 8


def test_a_script_that_counts_all_processes_itself_keeps_its_batch():
    two = told(f"torchrun --nproc_per_node 2 {FINETUNE} --batch_size 16 --micro_batch_size 4", {}).config
    assert (two["parallel"], two["batch"]["size"]) == ({"nproc": 2}, 16)


def test_one_of_several_processes_reads_the_same():
    """Each rank of `surefoot run -- torchrun …` reads the command again, now with WORLD_SIZE set."""
    text = f"torchrun --nproc_per_node 2 sft.py --model_name_or_path m --dataset_name d --output_dir o {PER_DEVICE}"
    assert told(text, {"WORLD_SIZE": "2"}).config == told(text, {}).config


def test_llamafactory_starts_as_many_as_it_is_told():
    asked = told(f"FORCE_TORCHRUN=1 NPROC_PER_NODE=2 {TUNED} {PER_DEVICE}", {}).config
    assert (asked["parallel"], asked["batch"]["size"]) == ({"nproc": 2}, 16)
    launched = told(f"torchrun --nproc_per_node 4 src/train.py {TUNED.partition('train ')[2]} {PER_DEVICE}", {}).config
    assert (launched["parallel"], launched["batch"]["size"]) == ({"nproc": 4}, 32)


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


def one_of_files(path: str) -> str:
    return FILES[path] if path in FILES else no_files(path)


def told(text: str, environment: dict[str, str], devices: int = 1, **settings):
    options = Options(devices=devices, read=one_of_files, environment=environment, **settings)
    return translate_command(shlex.split(text), options)


@pytest.mark.parametrize(
    ("text", "environment", "code", "name"),
    [
        (TUNED, {"NPROC_PER_NODE": "some"}, SETTING, "NPROC_PER_NODE"),
        (TUNED, {"MAX_NNODES": "2"}, COMMAND, "MAX_NNODES"),
        (TUNED, {"USE_MODELSCOPE_HUB": "1"}, COMMAND, "USE_MODELSCOPE_HUB"),
        (FINETUNE, {"ACCELERATE_MIXED_PRECISION": "fp8"}, SETTING, "mixed_precision"),
        (FINETUNE, {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, SETTING, "ACCELERATE_DYNAMO_BACKEND"),
    ],
)
def test_the_environment_of_the_process_counts_as_if_it_stood_in_the_command(text, environment, code, name):
    assert refused_settings(lambda: told(text, environment), code) == [name]
    ((variable, value),) = environment.items()
    assert refused_settings(lambda: told(f"{variable}={value} {text}", {}), code) == [name]
    told(text, {})
    told(text, {variable: "no" if variable.startswith("ACCELERATE") else "0"})


def test_what_the_command_says_goes_before_the_environment():
    forced = "FORCE_TORCHRUN=1 NPROC_PER_NODE=2"
    assert told(f"{forced} NNODES=1 {TUNED}", {"NNODES": "2"}).config["parallel"] == {"nproc": 2}
    asked = told(f"ACCELERATE_MIXED_PRECISION=fp16 {FINETUNE}", {"ACCELERATE_MIXED_PRECISION": "bf16"})
    assert asked.config["precision"]["compute"] == "fp16"


def test_what_the_process_happens_to_have_is_not_told_where_nobody_reads_it():
    found = told(FINETUNE, {"NNODES": "2", "WANDB_PROJECT": "demo"})
    assert found.environment == {"WANDB_PROJECT": "demo"}
    assert [note.word for note in found.notes if note.where in ("NNODES", "WANDB_PROJECT")] == ["WANDB_PROJECT=demo"]
    assert found.config["report_to"] == ["wandb"]
    assert found.config["tracking"]["project"] == "demo"
    assert "report_to" not in told(FINETUNE, {}).config
    typed = told(f"NNODES=2 {FINETUNE}", {})
    assert typed.environment == {"NNODES": "2"}


def test_allow_extra_args_of_the_environment_is_heard():
    assert refused_settings(lambda: told(f"{TUNED} --qwertzuiop 1", {})) == ["qwertzuiop"]
    assert "--qwertzuiop 1" in [note.word for note in told(f"{TUNED} --qwertzuiop 1", {"ALLOW_EXTRA_ARGS": "1"}).notes]


@pytest.mark.parametrize("program", [FINETUNE, TUNED, "train_sft.py --model m --data d --out o", "sft.py --bf16 false"])
@pytest.mark.parametrize("how", ["launcher", "environment"])
def test_the_launchers_precision_reaches_every_tool(program, how):
    more = " --model_name_or_path m --dataset_name d --output_dir o" if program.startswith("sft") else ""
    before = "accelerate launch --mixed_precision bf16 " if how == "launcher" else ""
    found = told(f"{before}{program}{more}", {"ACCELERATE_MIXED_PRECISION": "bf16"} if how == "environment" else {})
    assert found.config["precision"]["compute"] == "bf16"
    without = told(f"{program}{more}", {}).config.get("precision", {}).get("compute", "fp32")
    assert without == "fp32"


def test_what_the_program_says_goes_before_the_launcher():
    found = told(f"accelerate launch --mixed_precision bf16 {FINETUNE} --fp16", {})
    assert found.config["precision"]["compute"] == "fp16"


def test_axolotl_decides_the_precision_itself_and_the_note_says_so():
    FILES["a.yml"] = "base_model: m\ndatasets: [{path: d.json, type: alpaca}]\nfp16: true\nadapter: lora\nlora_r: 8\n"
    FILES["a.yml"] += (
        "lora_alpha: 16\nlora_target_linear: true\nmicro_batch_size: 1\nnum_epochs: 1\nlearning_rate: 1e-4\n"
    )
    found = told("accelerate launch --mixed_precision bf16 -m axolotl.cli.train a.yml", {})
    assert found.config["precision"]["compute"] == "fp16"
    (note,) = [note for note in found.notes if note.where == "--mixed_precision"]
    assert "only" in note.why


def test_llamafactory_on_several_devices_keeps_its_batch():
    size = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4"
    two = told(f"{TUNED} {size}", {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert two.config["batch"] == {"size": 16, "micro": 2}
    assert any("2 processes" in note.word and "batch.size" in note.keys for note in two.notes)
    assert two.config["parallel"] == {"nproc": 2}
    assert told(f"{TUNED} {size}", {}, devices=4).config["batch"]["size"] == 32
    assert told(f"{TUNED} {size}", {"CUDA_VISIBLE_DEVICES": "3"}, devices=4).config["batch"]["size"] == 8
    assert told(f"{TUNED} {size}", {"CUDA_VISIBLE_DEVICES": ""}, devices=4).config["batch"]["size"] == 8


def test_the_devices_that_a_launcher_chooses_are_those_of_the_run():
    assert told(f"accelerate launch --gpu_ids 3 {FINETUNE}", {}, devices=8).environment == {"CUDA_VISIBLE_DEVICES": "3"}
    assert told(f"accelerate launch --cpu {FINETUNE}", {}).environment == {"CUDA_VISIBLE_DEVICES": ""}
    assert told(f"deepspeed --include localhost:3 {FINETUNE}", {}).environment == {"CUDA_VISIBLE_DEVICES": "3"}
    assert told(f"accelerate launch --num_processes 1 {FINETUNE}", {}).environment == {}
