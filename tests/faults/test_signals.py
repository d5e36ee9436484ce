"""SIGKILL and SIGTERM at random moments of runs of every stage: bit for bit the end of the undisturbed run."""

import random
from itertools import product

import pytest

from faults import signals
from faults.signals import KILLED, STOPPED, Killing, Stopping
from faults.stages import ADAPTERS, COMBINATIONS, PRECISIONS, SAVED, STAGES, STEPS, Runs
from faults.trials import fresh_seed, many
from helpers.fork_server import ForkServer
from helpers.run_position import BEFORE, EVALUATION, PARTS, SAVE, STEP, Whereabouts, read
from helpers.tiers import representatives
from surefoot.runs.publish import is_published

KILLED_RUNS, STOPPED_RUNS = {"make test": 1, "make test-long": 5}, {"make test": 1, "make test-long": 8}
IN_A_STEP = 1  # a seed that has the signal sent in one, which no run ends before
MOST_KILLS = 5  # of one run, in the long version
IN_SAVES, ENOUGH = 0.25, 60  # of all kills, at the least, where there are so many


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with ForkServer() as server:
        yield Runs(tmp_path_factory.mktemp("runs"), server)


TIERS = representatives(KILLED_RUNS, "make test")
KILLED_STAGES = representatives(product(STAGES, KILLED_RUNS), ("sft", "make test"))


@pytest.mark.parametrize(("stage", "tier"), KILLED_STAGES)
def test_killed_runs_end_as_if_nothing_had_been(runs, tmp_path, stage, tier):
    """One combination of each stage, drawn anew; `make soak` has all of them."""
    seed = fresh_seed()
    print("combination drawn with seed", seed)
    draw = random.Random(seed)
    killing = Killing(runs, [(stage, draw.choice(ADAPTERS), draw.choice(PRECISIONS))], 2)
    assert many(f"killed runs of {stage}", KILLED_RUNS[tier], killing, tmp_path) == []
    print("kills:", dict(killing.kills))


@pytest.mark.parametrize("tier", TIERS)
def test_a_run_that_is_asked_to_stop_saves_and_says_so(runs, tmp_path, tier):
    stopping = Stopping(runs, [("sft", "lora", "fp32")])
    assert many("stopped runs", STOPPED_RUNS[tier], stopping, tmp_path) == []


def test_twin_a_stop_that_takes_too_long_is_noticed(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(signals, "GRACE", 0.0)
    (wrong,) = many("stopped runs", 1, Stopping(runs, [("sft", "lora", "fp32")]), tmp_path, IN_A_STEP)
    assert "s from the signal to the end" in wrong


IN_THE_LAST_SAVE = {"at": "save", "n": 40, "number": 15}
IN_THE_SECOND = {**IN_THE_LAST_SAVE, "n": 20}


@pytest.mark.parametrize(("kill", "code", "saves"), [(IN_THE_LAST_SAVE, 0, SAVED), (IN_THE_SECOND, STOPPED, 2)])
def test_a_run_with_all_its_steps_goes_on_to_its_end(runs, tmp_path, kill, code, saves):
    config, where = runs.config(("sft", "lora", "fp32"), tmp_path / "run"), tmp_path / "where"
    assert runs.server.run(["train", config], tmp_path / "log.txt", kill, where=where) == code
    assert (read(where).asked_in, read(where).saves) == (SAVE, saves)
    assert is_published(tmp_path / "run", STEPS) == (code == 0)


@pytest.mark.parametrize(
    ("part", "saves", "over"),
    [(EVALUATION, SAVED - 1, True), (EVALUATION, 1, False), (SAVE, SAVED, True), (SAVE, 1, False), (STEP, 2, False)],
)
def test_a_run_is_over_from_its_last_evaluation_on(part, saves, over):
    assert signals.is_over(Whereabouts(part, part, 1.0, saves)) is over


@pytest.mark.soak("killed runs")
def test_many_killed_runs_end_as_if_nothing_had_been(runs, trials, tmp_path):
    killing = Killing(runs, COMBINATIONS, MOST_KILLS)
    assert many("killed runs", trials, killing, tmp_path) == []
    print("kills:", dict(killing.kills))
    enough = killing.kills.total() >= ENOUGH  # for the share to be what was drawn, and not luck
    assert not enough or killing.kills[SAVE] >= IN_SAVES * killing.kills.total()


@pytest.mark.soak("stopped runs")
def test_many_runs_that_are_asked_to_stop_save_and_say_so(runs, trials, tmp_path):
    assert many("stopped runs", trials, Stopping(runs, COMBINATIONS), tmp_path) == []


KILLS = [("write", 1, BEFORE), ("update", 3, STEP), ("save", 1, SAVE), ("save", 40, SAVE), ("again", 1, BEFORE)]


@pytest.mark.parametrize(("at", "n", "part"), representatives(KILLS, KILLS[2]))
def test_where_a_kill_fell_is_known(runs, tmp_path, at, n, part):
    config, where = runs.config(("sft", "lora", "fp32"), tmp_path / "run"), tmp_path / "where"
    kill = {"at": at, "n": n}
    assert runs.server.run(["train", config], tmp_path / "log.txt", kill, where=where) == KILLED
    found = read(where)
    assert (found.killed_in, found.asked_in) == (part, part)


def test_the_whereabouts_of_a_run_that_ends(runs, tmp_path):
    config, where = runs.config(("ppo", "lora", "fp32"), tmp_path / "run"), tmp_path / "where"
    assert runs.server.run(["train", config], tmp_path / "log.txt", {"at": "step", "n": 10**9}, where=where) == 0
    parts = where.read_text().splitlines()
    assert set(parts) == set(PARTS)
    assert (parts.count(SAVE), parts.count(STEP), read(where).saves) == (SAVED, STEPS, SAVED)
    assert read(where).asked_at is None
