"""How many processes share a step of Axolotl's: its launcher, Ray, and the sizes of its device mesh."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.faults import raises_fault
from interop.axolotl_configs import axolotl, refused
from interop.small_configs import outcome, text_of
from surefoot.interop.launch import Options
from surefoot.interop.registry import translate_command
from surefoot.interop.translation import Translation
from surefoot.system.errors import InputError

MESH = [
    {"dp_shard_size": 4, "dp_replicate_size": 2, "tensor_parallel_size": 2},
    {"dp_shard_size": 2, "context_parallel_size": 2, "tensor_parallel_size": 2},
    {"expert_parallel_size": 4},
    {"expert_parallel_size": 2, "dp_shard_size": 2},
    {"context_parallel_size": 8},
    {"dp_shard_size": 1},
]
STEP = {"micro_batch_size": 2, "gradient_accumulation_steps": 3}


def batch_of(world: int, sizes: dict[str, int]) -> int:
    """`normalize_config` of Axolotl (067b021), in examples."""
    own = world // sizes.get("context_parallel_size", 1) // sizes.get("tensor_parallel_size", 1)
    return STEP["micro_batch_size"] * STEP["gradient_accumulation_steps"] * own


def command(*words: str, devices: int = 1, **more: Any) -> Translation:
    options = Options(read=lambda path: text_of("axolotl", **(STEP | more)), devices=devices)
    return translate_command(["axolotl", "train", "a.json", *words], options)


@pytest.mark.parametrize("sizes", MESH)
def test_a_step_has_axolotls_examples(sizes: dict[str, int]) -> None:
    world = 1
    for size in sizes.values():
        world *= size
    found = axolotl(**STEP, **sizes)
    assert found.config["batch"]["size"] == batch_of(world, sizes)
    assert {outcome(found, name) for name in sizes} == {"listed" if world == 1 else "changed"}
    started = command("--launcher", "torchrun", "--", f"--nproc_per_node={2 * world}", **sizes)
    assert started.config["batch"]["size"] == batch_of(2 * world, sizes)
    assert started.config["parallel"]["nproc"] == batch_of(2 * world, sizes) // 6


def test_sizes_that_do_not_divide_the_processes() -> None:
    with pytest.raises(InputError) as caught:
        command("--num-processes", "3", tensor_parallel_size=2)
    assert [fault.what.partition(":")[0] for fault in caught.value.faults] == ["tensor_parallel_size"]
    assert refused(context_parallel_size=0) == {"context_parallel_size"}


@pytest.mark.parametrize(
    ("words", "devices", "processes"),
    [
        (["--launcher", "torchrun", "--", "--nproc_per_node=2", "--nnodes=1"], 1, 2),
        (["--launcher", "accelerate", "--", "--num_processes=4"], 1, 4),
        (["--num-processes", "2"], 8, 2),
        (["--launcher", "python", "--learning-rate", "1e-4"], 8, 1),
        ([], 8, 8),  # accelerate starts one for each device
        (["--launcher", "torchrun"], 8, 1),
    ],
)
def test_the_launcher_decides_the_processes(words: list[str], devices: int, processes: int) -> None:
    found = command(*words, devices=devices)
    assert found.config["batch"]["size"] == 6 * processes
    assert found.config.get("parallel", {}).get("nproc", 1) == processes


def test_rays_workers_are_the_processes() -> None:
    found = axolotl(**STEP, use_ray=True, ray_num_workers=4)
    assert (found.config["batch"]["size"], found.config["parallel"]["nproc"]) == (24, 4)
    assert axolotl(**STEP, ray_num_workers=4).config["batch"]["size"] == 6


@pytest.mark.parametrize("flag", ["--sweep", "--cloud"])
def test_several_runs_and_other_machines_are_refused(flag: str) -> None:
    with raises_fault("SF-TRANSLATE-SETTING", flag):
        command(flag, "other.yaml")
