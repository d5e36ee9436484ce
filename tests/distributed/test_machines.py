"""Two machines: surefoot's own launcher runs once for each, with its place in the environment. Here both are this one,
and the run folder is shared as a network folder would be."""

import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from distributed.runs import (
    ENDLESS,
    SETTINGS,
    Started,
    alive,
    rows,
    run_forked,
    start,
    surefoot,
    write_config,
    write_world,
)

SOON = 60.0  # seconds within which a broken run has ended
PAIR = {"nproc": 1, "machines": 2}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return write_world(tmp_path_factory.mktemp("machines"))


def on_two(config: Path, *words: str) -> list[Started]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        start(
            surefoot("train", config, *words),
            config.with_name(f"{config.stem}-{index}"),
            {**place, "NODE_RANK": str(index)},
        )
        for index in range(2)
    ]


def ends(started: list[Started]) -> list[tuple[int, str]]:
    return [one.end()[:2] for one in started]


def weights(output: Path) -> bytes:
    return (output / "adapter_model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def two(world) -> bytes:
    """Weights of the same run in two processes of one machine."""
    output = world / "two"
    code, said = run_forked(["train", write_config(world, output, parallel={"nproc": 2})], world / "log.txt")
    assert code == 0, said
    return weights(output)


@pytest.mark.slow
def test_two_machines_train_what_two_processes_do(world, two):
    both = world / "both"
    (first, told), (second, other) = ends(on_two(write_config(world, both, parallel=PAIR)))
    assert (first, second) == (0, 0), told + other
    assert weights(both) == two
    assert told.count("step 6/6") == 1
    assert "step" not in other  # rank 1 writes to ranks/rank-1.log


def test_twin_another_seed_is_another_run(world, two):
    twin = world / "twin"
    code, said = run_forked(["train", write_config(world, twin, parallel={"nproc": 2}, seed=7)], world / "log.txt")
    assert code == 0, said
    assert weights(twin) != two


def test_a_machine_without_a_place_starts_nothing(world):
    output = world / "nowhere"
    code, said = run_forked(["train", write_config(world, output, parallel=PAIR)], world / "log.txt")
    assert code == 3, said
    assert said.count("error: NODE_RANK") == 1
    assert not output.exists()


@pytest.mark.slow
def test_a_machine_that_is_lost_ends_the_other_and_both_resume(world):
    output = world / "lost"
    settings: dict[str, Any] = {**SETTINGS, **ENDLESS, "parallel": PAIR}
    config = write_config(world, output, **settings)
    started = on_two(config)
    Started(started[0].process, output, started[0].log).await_step(4)
    ranks = [rank for one in started for rank in one.ranks().values()]
    started[1].process.kill()
    code, said = started[0].end()[:2]
    assert code == 3, said
    _, left = psutil.wait_procs(ranks, timeout=SOON)
    assert not alive(left)
    done = rows(output)[-1]["current_steps"]  # a fast machine takes some more before it notices
    further = write_config(world, output, parallel=PAIR, duration=f"{done + 2} steps")
    (first, told), (second, other) = ends(on_two(further, "--resume"))
    assert (first, second) == (0, 0), told + other
    assert "resuming from" in told
    assert rows(output)[-1]["current_steps"] == done + 2 >= 6
