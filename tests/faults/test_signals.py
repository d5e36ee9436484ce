"""SIGKILL and SIGTERM at random moments of runs of every stage: bit for bit the end of the undisturbed run."""

from __future__ import annotations

import random

import pytest

from faults.signals import Killing, Stopping
from faults.stages import ADAPTERS, COMBINATIONS, PRECISIONS, STAGES, Runs
from faults.trials import fresh_seed, many
from forkserver import ForkServer

KILLED_RUNS_OF_A_STAGE, STOPPED_RUNS = 5, 8
MOST_KILLS = 5  # of one run, in the long version
IN_SAVES, ENOUGH = 0.25, 60  # of all kills, at the least, where there are so many


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with ForkServer() as server:
        yield Runs(tmp_path_factory.mktemp("runs"), server)


@pytest.mark.parametrize("stage", STAGES)
def test_killed_runs_end_as_if_nothing_had_been(runs, tmp_path, stage):
    """One combination of each stage, drawn anew; `make soak` has all of them."""
    seed = fresh_seed()
    print("combination drawn with seed", seed)
    draw = random.Random(seed)
    killing = Killing(runs, [(stage, draw.choice(ADAPTERS), draw.choice(PRECISIONS))], 2)
    assert many(f"killed runs of {stage}", KILLED_RUNS_OF_A_STAGE, killing, tmp_path) == []
    print("kills:", dict(killing.kills))


def test_a_run_that_is_asked_to_stop_saves_and_says_so(runs, tmp_path):
    stopping = Stopping(runs, [("sft", "lora", "fp32")])
    assert many("stopped runs", STOPPED_RUNS, stopping, tmp_path) == []
    print(dict(stopping.codes))


@pytest.mark.soak("killed runs")
def test_many_killed_runs_end_as_if_nothing_had_been(runs, trials, tmp_path):
    killing = Killing(runs, COMBINATIONS, MOST_KILLS)
    assert many("killed runs", trials, killing, tmp_path) == []
    print("kills:", dict(killing.kills))
    enough = killing.kills.total() >= ENOUGH  # for the share to be what was drawn, and not luck
    assert not enough or killing.kills["save"] >= IN_SAVES * killing.kills.total()


@pytest.mark.soak("stopped runs")
def test_many_runs_that_are_asked_to_stop_save_and_say_so(runs, trials, tmp_path):
    stopping = Stopping(runs, COMBINATIONS)
    assert many("stopped runs", trials, stopping, tmp_path) == []
    print("exit codes:", dict(stopping.codes), f"slowest command {stopping.slowest:.0f} s")
