"""A run on two processes through the commands that people type: what it trains, and how it ends.

Each launcher, each way to end that hangs on how processes were started, and one engine of DeepSpeed are run as they are
typed; the other commands are forked."""

import json
import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from distributed.runs import (
    ENDLESS,
    FAILS_IN_SETUP,
    HANGS,
    SILENT,
    STALLED,
    UNHEARD,
    alive,
    changed,
    rows,
    run,
    run_forked,
    start,
    start_forked,
    stop,
    surefoot,
    write_config,
    write_world,
)
from helpers.faults import gives
from helpers.tiers import representatives

TWO = {"nproc": 2}
# fp32 sums over two ranks are rounded in another order; Adam's first steps divide by small moments.
LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
SOON = 60.0  # seconds within which a broken run has ended


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    return write_world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def one(world):
    """The same run in one process."""
    output = world / "one"
    code, said = run_forked(["train", write_config(world, output)], world / "one.txt")
    assert code == 0, said
    return output


@pytest.fixture(scope="module")
def two(world):
    output = world / "two"
    code, said = run_forked(["train", write_config(world, output, parallel=TWO)], world / "two.txt")
    assert code == 0, said
    return output, said


def same(first: Path, second: Path) -> bool:
    """Weights of two run folders, within WEIGHT_TOLERANCE."""
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    return furthest(a, b) <= WEIGHT_TOLERANCE


def furthest(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_two_ranks_train_what_one_does(one, two):
    output, _ = two
    assert [row.keys() for row in rows(one)] == [row.keys() for row in rows(output)]
    for ours, theirs in zip(rows(one), rows(output), strict=True):
        for name in ("loss", "eval_loss", "eval_accuracy", "eval_tokens", "total_tokens"):
            assert ours.get(name) == pytest.approx(theirs.get(name), abs=LOSS_TOLERANCE)
    assert same(one, output)


def test_twin_another_order_of_examples_is_seen(world, one):
    output = world / "other"
    code, said = run_forked(["train", write_config(world, output, seed=7)], world / "other.txt")
    assert code == 0, said
    assert not same(one, output)


@pytest.mark.slow
def test_a_run_of_two_ranks_is_merged_as_that_of_one(world, one, two):
    merged = {}
    for name, output in (("one", one), ("two", two[0])):
        folder = world / f"merged-{name}"
        words = ["export", output, "--merge", "--dtype", "fp32", "--out", folder]
        code, said = run_forked(words, folder.with_suffix(".txt"))
        assert code == 0, said
        merged[name] = load_file(folder / "model.safetensors")
    base = load_file(world / "base" / "model.safetensors")
    assert furthest(merged["one"], merged["two"]) <= WEIGHT_TOLERANCE
    assert furthest(merged["one"], base) > 10 * WEIGHT_TOLERANCE  # twin: an export that left the adapter out


def test_every_rank_is_recorded_and_the_plan_says_what_each_holds(two):
    output, said = two
    ranks = json.loads((output / "environment.json").read_text())["ranks"]
    assert [(one["rank"], one["engine"]) for one in ranks] == [(0, "DdpEngine"), (1, "DdpEngine")]
    assert all(one["parameters"] == one["of"] and one["optimizer"] == one["of_trainable"] for one in ranks)
    plan = json.loads((output / "plan.json").read_text())["plan"]
    assert plan["parallel"]["ranks"]["value"] == 2
    assert plan["batch"]["accumulation"] == 2
    assert "2 x cpu, ddp" in said
    assert said.count("step 6/6") == 1, "one rank talks"


SHARED = {
    "fsdp2": ({"engine": "fsdp2"}, {"parameters", "gradients", "optimizer"}),
    "zero-1": ({"engine": "deepspeed", "zero_stage": 1}, {"optimizer"}),
    "zero-2": ({"engine": "deepspeed", "zero_stage": 2}, {"gradients", "optimizer"}),
    "zero-3": ({"engine": "deepspeed", "zero_stage": 3}, {"parameters", "gradients", "optimizer"}),
    "zero-3 typed": ({"engine": "deepspeed", "zero_stage": 3}, {"parameters", "gradients", "optimizer"}),
}
SHARE = 0.6  # of all elements, at most, on each of two ranks


@pytest.mark.parametrize("engine", representatives(SHARED, "zero-3"))
def test_engines_that_share_weights_train_the_same_and_each_rank_holds_its_share(world, one, engine):
    asked, parts = SHARED[engine]
    if asked["engine"] == "deepspeed" and find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    output = world / engine.replace(" ", "-")
    config, log = write_config(world, output, parallel={**TWO, **asked}), output.with_suffix(".txt")
    code, said = run(surefoot("train", config), log) if "typed" in engine else run_forked(["train", config], log)
    assert code == 0, said
    assert same(one, output)
    for rank in json.loads((output / "environment.json").read_text())["ranks"]:
        for part, whole in (("parameters", "of"), ("gradients", "of_trainable"), ("optimizer", "of_trainable")):
            share = rank[part] / rank[whole]
            assert share <= SHARE if part in parts else share == 1, (rank, part)


@pytest.mark.parametrize("victim", representatives([0, 1], 1))
def test_a_killed_rank_ends_the_run_and_it_resumes(world, victim):
    output = world / f"killed-{victim}"
    config = write_config(world, output, parallel=TWO, **ENDLESS)
    started = start_forked(["train", config], output, changed(world / "k", linger=UNHEARD))
    started.await_step(4)
    ranks = started.ranks()
    stop(ranks[victim], signal.SIGKILL)
    code, said, seconds = started.end()
    assert code == 3, said
    assert seconds < SOON
    assert alive(list(ranks.values())) == []
    errors = [line for line in said.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, said
    assert f"rank {victim} (pid {ranks[victim].pid})" in errors[0]
    code, said = run_forked(["train", config, "--resume", "duration=8 steps"], world / "again.txt")
    assert code == 0, said
    assert "resuming from" in said


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.slow
def test_a_stopped_rank_ends_the_run(world, victim):
    output = world / f"stopped-{victim}"
    words = ["train", write_config(world, output, parallel=TWO, **ENDLESS)]
    more = changed(world / "h", silent=SILENT, stalled=STALLED, linger=UNHEARD)
    started = start_forked(words, output, more, told=UNHEARD)
    started.await_step(3)
    ranks = started.ranks()
    stop(ranks[victim])
    code, said, seconds = started.end()
    assert (code, said.count("error:")) == (3, 1), said
    assert re.search(rf"rank {victim} \(pid {ranks[victim].pid}\) ", said)
    assert seconds < SOON
    assert alive(list(ranks.values())) == []


@pytest.mark.parametrize("by", representatives(["forked", "typed"], "forked"))
def test_ranks_end_with_the_process_that_started_them(world, by):
    output = world / f"orphans-{by}"
    config = write_config(world, output, parallel=TWO, **ENDLESS)
    typed = by == "typed"
    started = start(surefoot("train", config), output) if typed else start_forked(["train", config], output)
    started.await_step(1)
    ranks = started.ranks()
    stop(ranks[1])  # a stopped one, too
    started.process.kill()
    gone, left = psutil.wait_procs(list(ranks.values()), timeout=SOON)
    assert (len(gone), left) == (2, [])


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(world):
    """tests/training/test_watchdog.py has the rule without waiting for it."""
    output = world / "hanging"
    more = changed(world / "hanging-rank", HANGS, silent=SILENT, stalled=STALLED)
    started = start_forked(["train", write_config(world, output, parallel=TWO, **ENDLESS)], output, more)
    started.await_step(3)
    ranks = started.ranks()
    code, said, _ = started.end()
    assert (code, said.count("error:")) == (3, 1), said
    (error,) = [line for line in said.splitlines() if line.startswith("error:")]
    assert "rank 1" in error
    assert alive(list(ranks.values())) == []


@pytest.mark.parametrize("to", representatives(["launcher", "rank 1"], "rank 1"))
def test_a_request_to_stop_stops_all_ranks_at_one_step(world, to):
    output = world / f"asked-{to[-1]}"
    config = write_config(world, output, parallel=TWO, **ENDLESS)
    typed = to == "launcher"
    started = start(surefoot("train", config), output) if typed else start_forked(["train", config], output)
    started.await_step(3)
    if typed:
        os.kill(started.process.pid, signal.SIGTERM)
    else:
        stop(started.ranks()[1], signal.SIGTERM)
    code, said, _ = started.end()
    assert code == 75, said
    assert "error" not in said
    step = int(said.partition("saved checkpoint-")[2].split()[0]) and rows(output)[-1]["current_steps"]
    code, said = run_forked(["train", config, "--resume", f"duration={step + 2} steps"], world / "on.txt")
    assert code == 0, said


def test_another_number_of_ranks_or_engine_goes_on_and_it_is_said(world):
    """fsdp2 cuts parameters, and goes on without the fast paths: with them it would end in a product of a part and a
    whole."""
    config = write_config(world, world / "changing", duration="1 steps", eval_every=None)
    told = []
    for step, more in enumerate(([], ["parallel.nproc=2"], ["parallel.nproc=2", "parallel.engine=fsdp2"], []), 1):
        words = ["train", config, "--resume", f"duration={step} steps", *more]
        code, said = run_forked(words, world / f"changing-{step}.txt")
        assert code == 0, said
        told.append(" ".join(said.split()))
    expected = [
        ["ranks were 1, are 2", "engine was single, is ddp"],
        ["engine was ddp, is fsdp2", "kernels.adapter was fast, is plain", "kernels.loss was chunked, is plain"],
        ["ranks were 2, are 1", "engine was fsdp2, is single"],
    ]
    assert [
        [one for one in changes if one in said] for changes, said in zip(expected, told[1:], strict=True)
    ] == expected
    assert "not bit for bit" not in told[0]


@pytest.mark.parametrize("engine", representatives(["ddp", "zero 2"], "zero 2"))
def test_two_ranks_look_at_their_paths_in_fp32_and_agree(world, engine):
    output = world / f"narrow-{engine}"
    parallel = TWO if engine == "ddp" else {**TWO, "engine": "deepspeed"}
    config = write_config(world, output, parallel=parallel, duration="2 steps", precision="bf16")
    code, said = run_forked(["train", config], output.with_suffix(".txt"))
    assert code == 0, said
    first, second = (rank["fast_paths"] for rank in json.loads((output / "environment.json").read_text())["ranks"])
    assert first.keys() == second.keys() >= {"adapter", "loss"}
    for name, found in first.items():
        assert found["used"]
        assert 0 < found["fp32"]["differs"] < found["fp32"]["limit"] < found["differs"]["gradient"]
        assert found["fp32"] == second[name]["fp32"]


def test_a_rank_that_fails_says_so_once(world):
    output = world / "failing"
    more = changed(world / "failing-rank", FAILS_IN_SETUP, of="surefoot.runs.follow")
    code, said = run_forked(["train", write_config(world, output, parallel=TWO)], world / "failing.txt", more)
    assert code == 2, said
    assert said.count("error:") == 1, said
    assert "rank 1: train.json: " in said


def test_a_fault_of_the_config_is_said_once(world):
    output = world / "refused"
    (output).mkdir()
    (output / "mine.txt").write_text("mine")
    code, said = run_forked(["train", write_config(world, output, parallel=TWO)], world / "refused.txt")
    assert code == 2, said
    assert said.count("error:") == 1, said
    assert [path.name for path in output.iterdir()] == ["mine.txt"]


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"],
    "accelerate": [
        sys.executable,
        *["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1"],
        *["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"],
    ],
}


@pytest.mark.parametrize("launcher", representatives(LAUNCHERS))
def test_launchers_start_the_same_run(world, two, launcher):
    output = world / launcher
    words = surefoot("train", write_config(world, output))[1:]
    code, said = run([*LAUNCHERS[launcher], *words], world / f"{launcher}.txt")
    assert code == 0, said
    assert same(two[0], output)
    assert said.count("step 6/6") == 1


def test_the_place_that_deepspeeds_launcher_gives_the_rank_is_accepted(world):
    words = ["--local_rank=0", "plan", write_config(world, world / "planned")]
    assert run_forked(words, world / "p.txt")[0] == 0


WRONG = {
    "MASTER_ADDR": {"WORLD_SIZE": "2", "RANK": "0"},
    "RANK: is 2": {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    "MASTER_PORT: is 0": {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"},
    "RANK": {"WORLD_SIZE": "two"},
}


def test_a_wrong_environment_is_one_line(world):
    for named, environment in WRONG.items():
        code, said = run_forked(["train", write_config(world, world / "wrong")], world / "wrong.txt", environment)
        assert code == 3, said
        assert named in said
        assert len(said.splitlines()) == 1, said


def test_single_among_several_is_refused(world):
    parallel = {"nproc": 2, "engine": "single"}
    code, said = run_forked(["train", write_config(world, world / "single", parallel=parallel)], world / "single.txt")
    assert code == 2, said
    assert said.count("error:") == 1
    assert all(gives(said, value) for value in ("parallel.nproc", 2, "parallel.engine")), said
