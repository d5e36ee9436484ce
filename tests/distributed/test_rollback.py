"""A run of two ranks whose data make the loss NaN goes back and around them together, as a run in one process does.

Twice in each run, so that every rank begins three times; the ranks are forked, to save their imports.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from helpers.fork_server import ForkServer
from helpers.rollback_runs import examples_by_step, rollback_world, write_config
from helpers.tiers import representatives
from surefoot.report.verification import compare_folders
from surefoot.runs.rollback import RECORD
from surefoot.training.checkpoint import list_checkpoints
from surefoot.training.guard import Rollback

# fp32 sums over ranks and shares are taken in another order, after steps of 3e-3. Measured: 4e-8.
WEIGHT_TOLERANCE = 1e-6
GROWTH = 1.2  # in memory from one beginning to the next, at most: a checkpoint's moments are there from the second on
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp"},
    "fsdp2": {"engine": "fsdp2"},
    "zero1": {"engine": "deepspeed", "zero_stage": 1},
    "zero2": {"engine": "deepspeed", "zero_stage": 2},
    "zero3": {"engine": "deepspeed", "zero_stage": 3},
}
STEPS = "6 steps"
TWICE = [Rollback(back_to=2, lost=4, ahead=2), Rollback(back_to=2, lost=4, ahead=4)]
KILLS = {
    "ddp": {"at": "again", "n": 2, "rank": 1},
    "zero3": {"at": "again", "n": 2, "rank": 0},  # the record is written
    "fsdp2": {"at": "again", "n": 2, "rank": 1, "delay": 0.1},
}


class World:
    def __init__(self, folder: Path, server: ForkServer):
        self.folder, self.server = rollback_world(folder), server
        assert self.run("clean", bad=(), ranks=1, duration="10 steps")[0] == 0
        data = examples_by_step(folder / "clean")
        # of steps 3 to 6, in turn in the micro-batch of rank 0 and of rank 1
        self.bad = [data[3][0], data[4][-1], data[5][0], data[6][-1]]
        self.all_bad = [data[step][-1] for step in range(3, 11)]
        self._straight: dict[str, tuple[Path, str]] = {}

    def run(self, name: str, engine: str = "", *more: str, bad=None, ranks=2, kill=None, change="", duration=STEPS):
        parallel = ENGINES[engine] if engine else {}
        if parallel.get("engine") == "deepspeed" and find_spec("deepspeed") is None:
            pytest.skip("deepspeed is not installed")
        log = self.folder / f"{name}.txt"
        config = write_config(self.folder, name, duration=duration, parallel=parallel)
        bad = self.bad if bad is None else bad
        code = self.server.run(["train", config, *more], log, kill, ranks=ranks, bad=bad, change=change)
        return code, log.read_text()

    def straight(self, engine: str) -> tuple[Path, str]:
        """The run that nothing disturbed, and what it said; `engine` "" is one process."""
        if engine not in self._straight:
            name = f"straight-{engine or 'one'}"
            ways: dict[str, Any] = {"change": "distributed.changed:says_tensors"} if engine else {"ranks": 1}
            code, said = self.run(name, engine, **ways)
            assert code == 0, said
            self._straight[engine] = self.folder / name, said
        return self._straight[engine]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with ForkServer() as server:
        yield World(tmp_path_factory.mktemp("world"), server)


def story(run: Path) -> list[dict[str, Any]]:
    """Which examples rank 0 and the device have seen is in the words of the guard alone."""
    record = json.loads((run / RECORD).read_text())["rollbacks"]
    return [{name: one[name] for name in ("rollback", "examples")} for one in record]


def same(first: Path, second: Path) -> bool:
    """Published weights, within WEIGHT_TOLERANCE."""
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (first, second))
    return a.keys() == b.keys() and all((a[name] - b[name]).abs().max() <= WEIGHT_TOLERANCE for name in a)


@pytest.mark.parametrize("engine", representatives(ENGINES, "ddp"))
def test_two_ranks_go_back_as_one_does(world, engine):
    one, _ = world.straight("")
    two, said = world.straight(engine)
    assert [Rollback(**entry["rollback"]) for entry in story(two)] == TWICE
    assert story(two) == story(one)
    assert same(one, two)
    assert len(re.findall(r"step 4\b.*checkpoint-2\b", said)) == 2, "one rank talks"
    assert [one.step for one in list_checkpoints(two)] == [6, 4]
    for rank in ("0", "1"):  # the models of a beginning go before those of the next come
        found = [int(count) for count in re.findall(rf"rank {rank}: (\d+) bytes in memory", said)]
        assert len(found) == 3
        assert max(found) <= GROWTH * found[0], found


def test_twin_a_rank_that_forgets_the_rollback_is_noticed(world):
    code, said = world.run("forgetful", "ddp", change="distributed.changed:forgets_rollbacks")
    assert code == 0, said
    assert not same(world.straight("")[0], world.folder / "forgetful")


def test_twin_what_was_handed_over_before_is_not_taken_for_new(world):
    code, said = world.run("stale", "ddp", change="distributed.changed:keeps_hand_over")
    assert code == 3, said
    assert "[SF-RANKS-DIFFER]" in said


@pytest.mark.parametrize("engine", representatives(KILLS, "ddp"))
def test_a_rank_that_is_killed_within_the_rollback_changes_nothing(world, engine):
    name = f"killed-{engine}"
    code, said = world.run(name, engine, kill=KILLS[engine], change="distributed.changed:waits_for_no_last_words")
    assert code == (-9 if KILLS[engine]["rank"] == 0 else 3), said
    assert len(story(world.folder / name)) == 1
    code, said = world.run(name, engine, "--resume")
    assert code == 0, said
    straight, _ = world.straight(engine)
    assert story(world.folder / name) == story(straight)
    assert compare_folders(straight, world.folder / name) == []


@pytest.mark.slow
def test_at_most_twice_then_all_ranks_end_as_diverged(world):
    code, said = world.run("thrice", "ddp", bad=world.all_bad)
    assert code == 5, said
    assert said.count("error:") == 1, said
    assert "[SF-DIVERGED]" in said
    assert len(story(world.folder / "thrice")) == 2
