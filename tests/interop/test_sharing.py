"""deepspeed: FILE, fsdp and fsdp_config: the engine, and every word of a file with its outcome."""

from __future__ import annotations

import json
from typing import Any

import pytest

from helpers.faults import refused_settings
from surefoot.config.load import check_config
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command, translate_file
from surefoot.system.errors import Fault, InputError

# As in transformers' documentation of ZeRO-3 with offloading, word by word.
ZERO3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16,
             "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR",
                  "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": False,
}  # fmt: skip
FACTORY = {
    "model_name_or_path": "m", "stage": "sft", "do_train": True, "dataset": "d", "template": "llama3",
    "output_dir": "o", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "bf16": True,
}  # fmt: skip


def run_text(**words: Any) -> str:
    return json.dumps({**FACTORY, **words})


def refused_of_run(**words: Any) -> list[str]:
    return refused_settings(lambda: run({}, **words), text=run_text(**words))


def run(files: dict[str, Any], processes: int = 2, **words: Any):
    held = {"run.json": run_text(**words)}
    held |= {name: json.dumps(value) for name, value in files.items()}

    def read(path: str) -> str:
        if path not in held:
            raise InputError(Fault(path, "cannot be read"))
        return held[path]

    command = f"torchrun --nproc_per_node {processes} src/train.py run.json".split()
    return translate_command(command, Options(read=read))


def zero(**more: Any) -> dict[str, Any]:
    return {"ds.json": {"zero_optimization": {"stage": 2, **more}}}


@pytest.mark.parametrize(
    ("file", "parallel"),
    [
        ({"stage": 0}, {"engine": "ddp"}),
        ({"stage": 1}, {"engine": "deepspeed", "zero_stage": 1}),
        ({}, {"engine": "deepspeed", "zero_stage": 2}),
        ({"cpu_offload": True}, {"engine": "deepspeed", "zero_stage": 2, "offload": "optimizer"}),
        ({"offload_optimizer": {"device": "none"}}, {"engine": "deepspeed", "zero_stage": 2}),
        ({"stage": 3, "offload_param": {"device": "cpu"}}, {"engine": "deepspeed", "zero_stage": 3, "offload": "all"}),
    ],
)
def test_the_stage_and_what_is_offloaded(file, parallel):
    found = run(zero(**file), deepspeed="ds.json")
    assert {name: value for name, value in found.config["parallel"].items() if value != "none"} == {
        "nproc": 2,
        **parallel,
    }
    check_config(found.config, files=False)


def test_each_word_of_the_documented_file_has_an_outcome():
    found = run({"ds.json": ZERO3}, deepspeed="ds.json")
    assert found.config["parallel"] == {"nproc": 2, "engine": "deepspeed", "zero_stage": 3, "offload": "all"}
    assert found.config["optim"]["schedule"] == "constant"
    inside = {note.word.partition(":")[0]: note for note in found.notes if note.where == "ds.json"}
    assert len(inside) == 6 + 1 + 5 + 4 + 14 + 5 + 1
    assert inside["zero_optimization.stage"].keys[0] == "parallel.engine"
    assert inside["fp16.hysteresis"].outcome == "listed"
    assert inside["scheduler.type"].outcome == "changed"
    assert all(note.why for note in inside.values() if note.outcome != "carried")


def test_one_process_shares_nothing_out_and_says_so():
    found = run({"ds.json": ZERO3}, processes=1, deepspeed="ds.json")
    assert "parallel" not in found.config
    (note,) = [note for note in found.notes if note.word == "deepspeed: ds.json"]
    assert note.why
    assert not [key for key in note.keys if key.startswith("parallel")]


def test_numbers_that_agree_are_carried():
    numbers = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
               "gradient_clipping": 1.0, "bf16": {"enabled": True}}  # fmt: skip
    found = run({"ds.json": {**zero()["ds.json"], **numbers}}, deepspeed="ds.json")
    assert found.config["batch"]["size"] == 16
    assert {note.outcome for note in found.notes if note.word.startswith("train_batch_size")} == {"carried"}


REFUSED = {  # the word of the file that is refused -> what the file says
    "train_batch_size": {"train_batch_size": 8},
    "gradient_clipping": {"gradient_clipping": 0.5},
    "fp16.enabled": {"fp16": {"enabled": True}},
    "optimizer.type": {"optimizer": {"type": "Lamb"}},
    "optimizer.params.lr": {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}},
    "scheduler.type": {"scheduler": {"type": "OneCycle"}},
    "scheduler.params.warmup_num_steps": {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 50}}},
    "zero_optimization.stage": {"zero_optimization": {"stage": 5}},
    "zero_optimization.offload_param.device": {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}},
    },
    "zero_optimization.zero_quantized_weights": {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
    "zero_optimization.overlap_com": {"zero_optimization": {"stage": 2, "overlap_com": True}},
    "zero_optimisation": {"zero_optimisation": {"stage": 2}},
    "progressive_layer_drop": {"progressive_layer_drop": {"enabled": True}},
}


def refused_inside(held: dict[str, Any], **words: Any) -> list[str]:
    """Which words of a file are refused. held: what ds.json has besides a ZeRO stage."""
    with pytest.raises(InputError) as caught:
        run({"ds.json": {**zero()["ds.json"], **held}}, **words)
    assert {fault.code for fault in caught.value.faults} == {"SF-TRANSLATE-SETTING"}
    return [fault.what.split(": ")[2] for fault in caught.value.faults]  # behind the setting and the file


def test_what_a_file_asks_for_in_vain():
    found = {name: refused_inside(held, deepspeed="ds.json") for name, held in REFUSED.items()}
    assert found == {name: [name] for name in REFUSED}


def test_a_file_that_is_not_there():
    assert refused_of_run(deepspeed="gone.json") == ["deepspeed"]


@pytest.mark.parametrize(
    ("words", "parallel"),
    [
        ({"fsdp": "full_shard auto_wrap"}, {"engine": "fsdp2"}),
        ({"fsdp": ["full_shard", "offload"]}, {"engine": "fsdp2", "offload": "all"}),
        ({"fsdp": "no_shard"}, {"engine": "ddp"}),
        ({"fsdp": "shard_grad_op"}, {"engine": "fsdp2"}),
        ({"fsdp": "full_shard", "fsdp_config": {"fsdp_offload_params": True}}, {"engine": "fsdp2", "offload": "all"}),
        ({"fsdp": "full_shard", "fsdp_config": "f.json"}, {"engine": "fsdp2"}),
    ],
)
def test_fsdp(words, parallel):
    found = run({"f.json": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "version": 2}}, **words)
    assert found.config["parallel"] == {"nproc": 2, **parallel}
    check_config(found.config, files=False)


def test_what_fsdp_asks_for_in_vain():
    assert refused_of_run(fsdp="ful_shard") == ["fsdp"]
    both = {"fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 2}}}
    assert refused_of_run(**both) == ["fsdp"]
    for name, value in (("min_num_param", 1), ("xla", True)):
        assert refused_inside({}, fsdp="full_shard", fsdp_config={name: value}) == [name]


@pytest.mark.parametrize(
    ("flags", "parallel"),
    [
        ("--num_processes 2", {"nproc": 2}),
        ("--num_processes 2 --accelerate_config multi_gpu", {"nproc": 2}),
        ("--num_processes 4 --accelerate_config zero3", {"nproc": 4, "engine": "deepspeed", "zero_stage": 3}),
        ("--num_processes 2 --accelerate_config fsdp2", {"nproc": 2, "engine": "fsdp2"}),
        ("--num_processes 1", None),
        ("--accelerate_config single_gpu --num_processes 4", None),
        ("--accelerate_config zero2", {"nproc": 8, "engine": "deepspeed", "zero_stage": 2}),
    ],
)
def test_trl_starts_itself(flags, parallel):
    words = f"trl dpo --model_name_or_path m --dataset_name d --output_dir o {flags}".split()
    found = translate_command(words, Options())
    assert found.config.get("parallel") == parallel
    assert found.config["batch"].get("size", 16) == 8 * (parallel or {"nproc": 1})["nproc"]
    assert all(note.keys or note.why for note in found.notes)


def test_what_trl_is_told_in_vain():
    def started(flags: str):
        words = f"trl dpo --model_name_or_path m --dataset_name d --output_dir o {flags}".split()
        return translate_command(words, Options())

    assert refused_settings(lambda: started("--num_processes 2 --accelerate_config mine")) == ["accelerate_config"]
    assert refused_settings(lambda: started("--num_processes many")) == ["num_processes"]
    assert started("--num_processes 2 --num_machines 2").config["parallel"] == {"nproc": 1, "machines": 2}


def test_trl_starts_a_process_for_each_device_as_accelerate_does():
    words = ["trl", "dpo", "--model_name_or_path", "m", "--dataset_name", "d", "--output_dir", "o"]
    found = translate_command(words, Options(devices=4))
    assert (found.config["parallel"], found.config["batch"]["size"]) == ({"nproc": 4}, 32)
    assert "parallel" not in translate_command(["CUDA_VISIBLE_DEVICES=2", *words], Options(devices=4)).config
    assert "parallel" not in translate_command(["python", "dpo.py", *words[2:]], Options(devices=4)).config


@pytest.mark.parametrize(
    ("more", "count"), [({}, 4), ({"accelerate_config": "zero3"}, 4), ({"num_processes": None}, 1)]
)
def test_a_file_of_trls_says_it_too(more, count):
    given = {"model_name_or_path": "m", "dataset_name": "d", "output_dir": "o", "num_processes": 4, **more}
    found = translate_file("dpo.json", json.dumps(given), [], Options())
    assert found.config.get("parallel", {}).get("nproc", 1) == count
    assert found.config["batch"].get("size", 16) == 8 * count


def test_axolotl_says_it_in_the_same_words():
    text = (
        "base_model: m\ndatasets: [{path: d, type: alpaca}]\nlearning_rate: 1e-4\nfsdp_config: {offload_params: true}"
    )

    def read(path: str) -> str:
        return text

    command = ["accelerate", "launch", "--num_processes", "2", "-m", "axolotl.cli.train", "run.yml"]
    found = translate_command(command, Options(read=read)).config
    assert found["parallel"] == {"nproc": 2, "engine": "fsdp2", "offload": "all"}
    assert found["batch"]["size"] == 2  # one example for each process
