"""A run whose data make the loss NaN goes back to a healthy checkpoint and around them: every stage, at most twice."""

import functools
import json
import shutil

import pytest
from click.testing import CliRunner

from helpers.faults import gives, prints_fault, raises_fault
from helpers.nan_examples import spoil
from helpers.rollback_runs import STEPS, examples_by_step, one_of_each, rollback_world, write_config
from helpers.tiers import representatives
from surefoot.commands.main import main
from surefoot.config.schema import RunConfig
from surefoot.runs import run as run_module
from surefoot.runs.rollback import RECORD, Recorded, add_rollback, find_checkpoint, read_rollbacks
from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault, Fault, IntegrityError
from surefoot.training import loop as loop_module
from surefoot.training.checkpoint import list_checkpoints, read_state, retain
from surefoot.training.failure_names import failures_in
from surefoot.training.guard import Rollback

PASS = 10  # steps in which every record is seen once


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return rollback_world(tmp_path_factory.mktemp("rollback"))


@pytest.fixture(scope="module")
def clean(world):
    """Stage -> what each step of an untroubled pass learns from."""
    found = {}

    def get(stage):
        if stage not in found:
            name = f"clean-{stage}"
            result = train(write_config(world, name, stage, duration=f"{PASS} steps"))
            assert result.exit_code == 0, result.output
            found[stage] = examples_by_step(world / name)
        return found[stage]

    return get


def train(config, *arguments):
    return CliRunner().invoke(main, ["train", config, *arguments])


def events_of(run):
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def back(world, clean):
    """Stage -> the folder of a run whose data of steps 4 and 5 are bad, and what it said."""

    @functools.cache
    def get(stage):
        run = world / f"back-{stage}"
        with pytest.MonkeyPatch.context() as patch:
            spoil(one_of_each(clean(stage), (4, 5)), patch)
            result = train(write_config(world, run.name, stage))
        assert result.exit_code == 0, result.output
        return run, result

    return get


@pytest.mark.parametrize("stage", representatives(["sft", "reward", "dpo", "kto"], "sft"))
def test_it_goes_back_skips_the_data_and_takes_all_its_steps(clean, back, stage):
    data, (run, result) = clean(stage), back(stage)
    # checkpoint-4 stands between two bad steps: it is no healthy one, and the data of steps 3 to 5 are passed over
    assert [one.rollback for one in read_rollbacks(run)] == [Rollback(back_to=2, lost=5, ahead=3)]
    seen = examples_by_step(run)
    assert [seen[step] for step in range(1, STEPS + 1)] == [data[step] for step in (1, 2, 6, 7, 8, 9, 10)]
    skipped = [name for step in (3, 4, 5) for name in data[step]]
    assert list(read_rollbacks(run)[0].examples) == skipped
    (told,) = [event["text"] for event in events_of(run) if event["kind"] == "rollback"]
    assert all(gives(told, value) for value in (5, "checkpoint-2", 3, len(skipped)))
    results = json.loads((run / "all_results.json").read_text())
    assert (results["train_steps"], results["rollbacks"], results["skipped_steps"]) == (STEPS, 1, 0)
    assert gives(result.output, "checkpoint-2")
    assert told in (run / "report.html").read_text()
    assert not list(run.glob(".rejected-*"))


def test_ppo_goes_back_into_a_cycle_and_on_with_the_next_one(world, clean, monkeypatch):
    """Cycles of two steps: (3, 4), (5, 6), (7, 8). Step 4 was to learn from a rollout that is now given up, and the
    rest of the cycle of the bad step is passed over with it."""
    data = clean("ppo")
    spoil(one_of_each(data, (4, 5)), monkeypatch)
    run = world / "back-ppo"
    result = train(write_config(world, run.name, "ppo"))
    assert result.exit_code == 0, result.output
    assert [one.rollback for one in read_rollbacks(run)] == [Rollback(back_to=3, lost=5, ahead=3)]
    seen = examples_by_step(run)
    for cycle, of in (
        ((4, 5), (7, 8)),
        ((6, 7), (9, 10)),
    ):  # answers have the same prompts; how they are cut may differ
        ours, theirs = (
            [name for step in steps for name in found[step]] for steps, found in ((cycle, seen), (of, data))
        )
        assert sorted(ours) == sorted(theirs)
    assert set(read_rollbacks(run)[0].examples) >= {name for step in (4, 5, 6) for name in data[step]} - set(data[3])


def test_twin_without_the_skip_the_same_data_diverge_again(world, clean, monkeypatch):
    spoil(one_of_each(clean("sft"), (4, 5)), monkeypatch)
    real = run_module.make_task
    monkeypatch.setattr(
        "surefoot.runs.prepare.make_task", lambda config, plan, data, rollbacks: real(config, plan, data)
    )
    run = world / "unskipped"
    result = train(write_config(world, run.name))
    assert result.exit_code == 5
    assert [one.rollback.lost for one in read_rollbacks(run)] == [5, 5]


@pytest.mark.parametrize("rollback", representatives(["on", "off"], "on"))
def test_a_moment_that_goes_bad_in_memory_ends_the_run_at_once(world, rollback, monkeypatch):
    """With rollback as well: no data are to blame, so none are passed over."""
    spoilt, real = [], loop_module.train_step

    def spoiling(engine, *arguments, step, **named):
        if step == 4 and not spoilt:
            name = min(engine.parameters)
            engine.optimizer.state[engine.parameters[name]]["exp_avg"].fill_(float("inf"))
            spoilt.append(f"{name}/exp_avg")
        return real(engine, *arguments, step=step, **named)

    monkeypatch.setattr(loop_module, "train_step", spoiling)
    run = world / f"moment-{rollback}"
    result = train(write_config(world, run.name, guard={"rollback": rollback}))
    assert result.exit_code == 5
    assert prints_fault(result.output, "SF-DIVERGED", "step 4", f"({spoilt[0]})")
    assert [one.step for one in list_checkpoints(run)] == [2]
    assert not (run / RECORD).exists()


@pytest.mark.slow
def test_ppo_goes_back_to_a_checkpoint_before_step_1_and_resumes_from_it(world, clean, monkeypatch):
    """The first evaluation is the best one so far, and is saved."""
    spoil(one_of_each(clean("ppo"), (1, 2)), monkeypatch)
    run = world / "zero-ppo"
    data = {"train": str(world / "prompts.json"), "eval": str(world / "few.json"), "max_length": 64}
    (world / "few.json").write_text(json.dumps([{"prompt": "Say sky."}, {"prompt": "Say sea."}]))
    ways = {"checkpoint": {"every": "3 steps", "keep": 2}, "eval_at_start": True}
    result = train(write_config(world, run.name, "ppo", data=data, duration="4 steps", **ways))
    assert result.exit_code == 0, result.output
    assert [one.rollback.back_to for one in read_rollbacks(run)] == [0]


def test_a_rollback_that_cannot_be_written_down_hides_no_divergence(world, clean, monkeypatch):
    def full(*_):
        raise EnvironmentFault(Fault(RECORD, "unwritable"))

    spoil(one_of_each(clean("sft"), (4, 5)), monkeypatch)
    monkeypatch.setattr("surefoot.runs.rollback.add_rollback", full)
    run = world / "unwritten"
    result = train(write_config(world, run.name))
    assert result.exit_code == 5
    assert "unwritable" in result.output  # of this test
    assert prints_fault(result.output, "SF-DIVERGED", "step 5", 2)


def test_at_most_twice_then_it_ends_as_diverged(world, clean, monkeypatch):
    """Data steps 4 to 9 are bad. Back to step 2 and on with 6; lost at step 4, back to 2 and on with 8; lost again."""
    spoil(one_of_each(clean("sft"), range(4, 10)), monkeypatch)
    run = world / "thrice"
    result = train(write_config(world, run.name))
    assert result.exit_code == 5
    assert [one.rollback for one in read_rollbacks(run)] == [Rollback(2, 5, 3), Rollback(2, 4, 5)]
    assert prints_fault(result.output, "SF-DIVERGED", "step 4", 2)
    kinds = [event["kind"] for event in events_of(run) if event["kind"] in ("rollback", "diverged")]
    assert kinds.count("rollback") == 2
    assert kinds[-1] == "diverged"
    # the first three, and the newest; the same step of another try has a folder of its own
    names = ["failure-4", "failure-5", "failure-3-rollback-1", "failure-4-rollback-2"]
    assert [path.name for path in failures_in(run)] == names
    again = train(write_config(world, run.name), "--resume")  # goes on from step 2, with the data that it skipped to
    assert again.exit_code == 5
    assert len(read_rollbacks(run)) == 2


def test_off_is_the_default_and_without_a_healthy_checkpoint_it_ends(world, clean, monkeypatch):
    assert RunConfig.model_fields["guard"].default.rollback == "off"
    spoil(one_of_each(clean("sft"), (1, 2)), monkeypatch)
    early = train(write_config(world, "early", checkpoint={"every": "1 steps", "keep": 2}))
    assert early.exit_code == 5
    assert not (world / "early" / RECORD).exists()
    off = train(write_config(world, "off", guard={"max_consecutive": 2}))
    assert off.exit_code == 5
    assert not (world / "off" / RECORD).exists()
    assert "guard.rollback" not in off.output


def test_a_record_that_was_changed_is_named(back, tmp_path):
    run = shutil.copytree(back("sft")[0], tmp_path / "run")
    path = run / RECORD
    path.write_text(path.read_text().replace('"ahead": 3', '"ahead": 4'))
    for text in (path.read_text(), "{}"):
        path.write_text(text)
        with raises_fault("SF-CHECKPOINT-DAMAGED", path):
            find_checkpoint(run)
    path.unlink()  # what the checkpoint says is the same
    assert find_checkpoint(run)[2] == (Rollback(2, 5, 3),)


def test_where_the_checkpoint_is_gone_newer_ones_are_not_taken(world, clean, monkeypatch):
    spoil(one_of_each(clean("sft"), (4, 5)), monkeypatch)
    run = world / "gone"
    assert train(write_config(world, run.name, guard={"max_consecutive": 2}, checkpoint={"every": "1 steps"})).exit_code
    ours = [one.step for one in list_checkpoints(run)]
    assert 3 in ours
    assert max(ours) == 4
    add_rollback(run, Recorded(Rollback(3, 5, 2), (1, 2), "step 5"))
    assert find_checkpoint(run)[0].step == 3
    durable.remove(run / "checkpoint-3")
    for one in list_checkpoints(run):
        if one.step < 3:
            durable.remove(one.folder)
    with pytest.raises(IntegrityError) as caught:
        find_checkpoint(run)
    (fault,) = caught.value.faults
    assert fault.code == "SF-CHECKPOINT-NONE"
    assert gives(fault.what, "checkpoint-3")


def test_retention_leaves_the_last_healthy_checkpoint(world, clean, monkeypatch):
    spoil(one_of_each(clean("sft"), (4, 5, 6)), monkeypatch)
    ways = {"guard": {"max_consecutive": 4, "max_recent": 9}, "checkpoint": {"every": "1 steps", "keep": 2}}
    run = world / "kept"
    assert train(write_config(world, run.name, duration="6 steps", **ways)).exit_code == 0
    assert [one.step for one in list_checkpoints(run)] == [6, 5, 3]
    assert [read_state(one).is_healthy for one in list_checkpoints(run)] == [False, False, True]
    monkeypatch.setattr("surefoot.training.checkpoint._is_healthy", lambda checkpoint: False)  # twin
    retain(run, 2, None)
    assert [one.step for one in list_checkpoints(run)] == [6, 5]
