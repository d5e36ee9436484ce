"""A run whose process was killed, or crashed in native code, in the middle of a step: what is left, and taken again."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from helpers import planted_crashes
from helpers.faults import gives, lines_giving, prints_fault, raises_fault
from helpers.planted_crashes import STEP
from helpers.rollback_runs import rollback_world, write_config
from helpers.tiers import representatives
from helpers.trained_runs import heron_config, heron_folder
from surefoot.commands.main import main
from surefoot.report.death import death_in_a_step, find_death, read_trace
from surefoot.report.flight import FLIGHT, recent
from surefoot.report.verification import compare_folders
from surefoot.runs.failures import replay_apart
from surefoot.runs.failures.replay_apart import ChildReport
from surefoot.runs.failures.replay_run import rerun_step
from surefoot.system.errors import IntegrityError
from surefoot.training import loop as loop_module
from surefoot.training.checkpoint import list_checkpoints

KILLED, CRASHED = -9, -11


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("died"))


def config(world, name):
    return str(heron_config(world, name, duration="6 steps", checkpoint={"every": "2 steps"}))


@pytest.fixture(scope="module")
def whole(world, server):
    assert server.run(["train", config(world, "whole")], world / "whole.log") == 0
    return world / "whole"


@pytest.fixture(scope="module")
def killed(world, server):
    """In its fourth step; there is a checkpoint of the second."""
    assert server.run(["train", config(world, "killed")], world / "killed.log", {"at": "step", "n": STEP}) == KILLED
    return world / "killed"


@pytest.fixture(scope="module")
def crashed(world, server):
    """The same by SIGSEGV, in the forward pass of a module."""
    change = "helpers.planted_crashes:in_forward"
    assert server.run(["train", config(world, "crashed")], world / "crashed.log", change=change) == CRASHED
    return world / "crashed"


@pytest.fixture
def forked(server, monkeypatch, tmp_path):
    """The child that the command line starts is a fork, which need not import anything."""

    def run(program, *, input, **_):
        (tmp_path / "asked.json").write_text(input)
        log = tmp_path / "child.log"
        planted = "replayed_in_forward" if "in_forward" in program else "replayed"
        code = server.run([], log, folder=tmp_path, change=f"helpers.planted_crashes:{planted}")
        return SimpleNamespace(stdout=log.read_text(), stderr=log.read_text(), returncode=code)

    monkeypatch.setattr(replay_apart, "subprocess", SimpleNamespace(run=run))


def taken(run, **named):
    """What is told of the step, by word; the last of each."""
    heard = {}
    rerun_step(run, death_in_a_step(run).begun, heard.__setitem__, **named)
    return heard


def spoilt(engine, *arguments, real=loop_module.train_step, **named):
    if named["step"] == STEP:
        with torch.no_grad():
            next(iter(engine.parameters.values())).fill_(float("nan"))
    return real(engine, *arguments, **named)


def line_of(run, step):
    return next(line for line in recent(run) if line["step"] == step)


def same_numbers(heard, line):
    return all(json.loads(heard["done"])[name] == line[name] for name in ("loss", "grad_norm", "decision"))


def test_a_killed_step_is_taken_again_bit_for_bit(killed, whole, tmp_path):
    death = death_in_a_step(killed)
    assert (death.step, death.done, death.trace) == (STEP, STEP - 1, None)
    heard = taken(killed)
    assert (heard["starts"], heard["step"]) == ("2", str(STEP))
    assert "caution" not in heard
    assert same_numbers(heard, line_of(whole, STEP))
    assert not same_numbers(heard, line_of(whole, STEP - 1))  # twin
    bare = tmp_path / "run"
    shutil.copytree(killed, bare)
    for one in list_checkpoints(bare):
        shutil.rmtree(one.folder)
    heard = taken(bare)
    assert heard["starts"] == "0"
    assert heard["caution"]  # there is nothing to hold data and base model against
    assert same_numbers(heard, line_of(whole, STEP))


def test_twin_another_order_of_the_data_is_noticed(killed, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(killed, other)
    lines = (other / FLIGHT).read_text().splitlines()
    begun = json.loads(lines[-1])
    begun["examples"].reverse()
    (other / FLIGHT).write_text("\n".join([*lines[:-1], json.dumps(begun), ""]))
    with raises_fault("SF-REPLAY", other, STEP):
        taken(other)


def test_nothing_intact_to_begin_at_is_one_line(killed, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(killed, other)
    (checkpoint,) = list_checkpoints(other)
    (checkpoint.folder / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(IntegrityError) as caught:
        taken(other)
    damaged, *_, none = caught.value.faults
    assert (damaged.code, damaged.where) == ("SF-CHECKPOINT-DAMAGED", str(checkpoint.folder / "optimizer.safetensors"))
    assert none.code == "SF-CHECKPOINT-NONE"


@pytest.mark.usefixtures("forked")
def test_a_loss_of_a_python_caller_is_refused_in_one_line(killed, tmp_path):
    """No code of it lies in the run."""
    other = tmp_path / "run"
    shutil.copytree(killed, other)
    plan = json.loads((other / "plan.json").read_text())
    plan["verified"]["objective"] = "mine.loss"
    (other / "plan.json").write_text(json.dumps(plan))
    result = CliRunner().invoke(main, ["replay", str(other)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1), result.output
    assert "mine.loss" in result.output


def test_a_checkpoint_that_is_too_new_is_refused(killed, tmp_path):
    other = tmp_path / "run"
    shutil.copytree(killed, other)
    lines = (other / FLIGHT).read_text().splitlines()
    early = json.dumps({**json.loads(lines[-1]), "begins": 2})
    (other / FLIGHT).write_text("\n".join([*lines[:-1], early, ""]))
    with raises_fault("SF-REPLAY", other, "checkpoint-2", 2):
        taken(other)


def test_an_exception_and_a_value_that_is_not_finite_are_told(killed, monkeypatch):
    real = loop_module.train_step

    def refusing(engine, *arguments, **named):
        if named["step"] == STEP:
            raise ZeroDivisionError("own")
        return real(engine, *arguments, **named)

    monkeypatch.setattr(loop_module, "train_step", refusing)
    assert json.loads(taken(killed)["raised"])["error"] == "ZeroDivisionError: own"
    monkeypatch.setattr(loop_module, "train_step", spoilt)
    assert json.loads(taken(killed)["done"])["non_finite"] == "loss"


@pytest.mark.parametrize("child", representatives(["forked", "typed"], "forked"))
def test_a_crash_is_reproduced_and_its_module_named(crashed, child, monkeypatch, request):
    """In the run, and in a child of the command line."""
    if child == "forked":
        request.getfixturevalue("forked")
    assert str(Path(planted_crashes.__file__)) in (crashed / "run.log").read_text()
    assert find_death(crashed).trace.signal == "SIGSEGV"
    monkeypatch.setattr(replay_apart, "_PROGRAM", (sys.executable, planted_crashes.__file__, "in_forward"))
    result = CliRunner().invoke(main, ["replay", str(crashed)])
    assert result.exit_code == 0, result.output
    then, now, _ = result.output.splitlines()
    module = f"base_model.model.model.layers.{planted_crashes.LAYER}.mlp"
    assert lines_giving(then, STEP, "SIGSEGV", "string_at")
    assert lines_giving(now, STEP, "checkpoint-2", "SIGSEGV", "string_at", module)


@pytest.mark.usefixtures("forked")
def test_twin_a_step_that_lives_is_not_the_same(killed, whole):
    result = CliRunner().invoke(main, ["replay", str(killed), "--json"])
    assert result.exit_code == 6, result.output
    told = json.loads(result.stdout)
    assert (told["step"], told["start"], told["then"]) == (STEP, 2, None)
    assert told["now"]["loss"] == line_of(whole, STEP)["loss"]
    assert not told["same"]


def test_a_crash_on_the_way_back_is_told_where(killed, server, tmp_path):
    log = tmp_path / "log.txt"
    assert server.run([], log, folder=killed, change="helpers.planted_crashes:replayed_in_backward") == CRASHED
    heard = ChildReport.of(log.read_text(), STEP)
    assert heard.inside
    assert "base_model.model.model.layers.1.mlp" in heard.where


REACHED = {  # what a child said -> whether it was in the step, and what it names
    "starts 2\n": (False, set()),
    "step 3\n": (False, {3}),
    "part data\nstep 4\n": (False, set()),
    "part data\nstep 4\npart \n": (True, set()),
    "step 4\npart forward\nenters x.a\nenters x.a.b\nleaves x.a.b\n": (True, {"x.a"}),
    "step 4\npart forward\nenters x.a\nleaves x.a\n": (True, set()),
    "step 4\npart backward\n": (True, set()),
    "step 4\npart backward\nreaches x.a\n": (True, {"x.a"}),
    "step 4\npart backward\nreaches x.a\nenters x.a.b\n": (True, {"x.a.b"}),
    "step 4\npart backward\nreaches x.a\npart optimizer\n": (True, set()),
}


def test_how_far_a_step_came_is_told_each_way_otherwise():
    heard = {said: ChildReport.of(said, STEP) for said in REACHED}
    named = {said: {name for name in (3, "x.a", "x.a.b") if gives(one.where, name)} for said, one in heard.items()}
    assert {said: (one.inside, named[said]) for said, one in heard.items()} == REACHED
    assert len({one.where for one in heard.values()}) == len(REACHED)


def test_a_resumed_run_says_how_the_last_process_died_and_ends_the_same(world, crashed, whole, server, tmp_path):
    run = shutil.copytree(crashed, tmp_path / "run")
    (tmp_path / "run.yaml").write_text(Path(config(world, "crashed")).read_text().replace(str(crashed), str(run)))
    words = ["train", str(tmp_path / "run.yaml"), "--resume"]
    assert server.run(words, tmp_path / "log.txt") == 0
    (said,) = lines_giving((tmp_path / "log.txt").read_text(), STEP, "SIGSEGV", "string_at", "checkpoint-2")
    assert f"`surefoot replay {run}`" in said
    assert compare_folders(whole, run) == []
    assert find_death(run) is None
    result = CliRunner().invoke(main, ["replay", str(run)])
    assert (result.exit_code, result.output.count("\n")) == (2, 1)
    assert prints_fault(result.output, "SF-REPLAY", run)


def test_twin_after_a_stop_nothing_is_said(world, server, tmp_path):
    path = config(world, "stopped")
    kill = {"at": "step", "n": STEP, "number": 15}
    assert server.run(["train", path], tmp_path / "log.txt", kill) == 75
    assert server.run(["train", path, "--resume"], tmp_path / "again.txt") == 0
    assert "surefoot replay" not in (tmp_path / "again.txt").read_text()
    assert read_trace((world / "stopped" / "run.log").read_text()) is None


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    return rollback_world(tmp_path_factory.mktemp("others"))


@pytest.mark.slow
def test_a_step_of_answers_is_taken_again_bit_for_bit(others, server):
    """The third of its cycle's two: its answers are drawn again, by a model that the steps before it made."""
    whole = write_config(others, "ppo-whole", "ppo")
    assert server.run(["train", whole], others / "whole.log") == 0
    path = write_config(others, "ppo", "ppo")
    assert server.run(["train", path], others / "ppo.log", {"at": "step", "n": 6}) == KILLED
    heard = taken(others / "ppo")
    assert heard["starts"] == "3"
    assert same_numbers(heard, line_of(others / "ppo-whole", 6))


def test_a_rank_that_crashes_leaves_the_step_and_no_folder(others, server):
    """What its end broke in the first rank is not taken for a fault of the step, which one process takes whole."""
    path, run = write_config(others, "ranks", "sft"), others / "ranks"
    kill = {"at": "step", "n": 6, "number": 11, "rank": 1}
    change = "distributed.changed:waits_for_no_last_words"
    assert server.run(["train", path], others / "ranks.log", kill, ranks=2, change=change) == 3
    assert read_trace((others / "ranks.log").read_text()).signal == "SIGSEGV"
    assert not list(run.glob("failure-*"))
    heard = taken(run)
    assert (heard["starts"], heard["step"]) == ("4", "6")
    assert json.loads(heard["done"])["decision"] == "stepped"
    assert lines_giving(heard["caution"], 2, 1) or lines_giving(heard["caution"], "ddp")
