"""What is published was verified first."""

import json

import pytest

from helpers.faults import gives, lines_giving, raises_fault
from helpers.toy_model import save_checkpoint, toy_engine
from helpers.trained_runs import heron_config, heron_folder
from surefoot.config.schema import RunConfig
from surefoot.report.trainer_log import read_rows
from surefoot.runs import publish as module
from surefoot.runs.publish import chosen_step, is_published
from surefoot.system import durable
from surefoot.training.checkpoint import verify_checkpoint
from surefoot.training.manifest import manifest
from surefoot.training.state import Best, RunState

ENDED = RunState(step=4, best=Best(2, 0.5))


def damage(folder, name="state.json"):
    """One bit of a file."""
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(bytes(data))


@pytest.fixture
def run(tmp_path):
    """Checkpoints 2 (best) and 4 (last)."""
    for step in (2, 4):
        state = RunState(step=step)
        save_checkpoint(tmp_path, toy_engine(), state)
    return tmp_path


def test_the_best_is_published_where_it_is_asked_for(run):
    assert chosen_step(run, ENDED, keep_best=True) == (2, [])
    assert chosen_step(run, ENDED, keep_best=False) == (4, [])
    assert chosen_step(run, RunState(step=4), keep_best=True) == (4, [])


def test_a_damaged_best_is_not_published_and_named(run):
    damage(run / "checkpoint-2")
    step, cautions = chosen_step(run, ENDED, keep_best=True)
    assert step == 4
    assert "checkpoint-2/state.json" in cautions[0]
    assert gives(cautions[1], "checkpoint-4")


def test_twin_without_verification_it_would_be(run, monkeypatch):
    monkeypatch.setattr(module, "verify_checkpoint", lambda folder: [])
    with pytest.raises(AssertionError):
        test_a_damaged_best_is_not_published_and_named(run)


@pytest.mark.parametrize("best", [None, Best(2, 0.5), Best(4, 0.5)])
def test_a_damaged_last_one_ends_the_run(run, best):
    damage(run / "checkpoint-2")
    damage(run / "checkpoint-4")
    code = "SF-CHECKPOINT-DAMAGED"
    with raises_fault(code, f"{run}/checkpoint-4/state.json", also=[(code, run)]):
        chosen_step(run, RunState(step=4, best=best), keep_best=True)


@pytest.fixture
def train(server, tmp_path):
    """Run `surefoot train`; exit code, what it said, output folder."""
    heron_folder(tmp_path)

    def train(*arguments, crash=None, **changes):
        ways = {"adapter": {"kind": "lora", "rank": 4}, "batch": {"size": 2}} | changes
        path, log = heron_config(tmp_path, "out", **ways), tmp_path / "log.txt"
        log.write_text("")
        code = server.run(["train", str(path), *arguments], log, crash)
        return code, " ".join(log.read_text().split()), tmp_path / "out"

    return train


@pytest.fixture
def stopped(train, tmp_path):
    """A run that was killed after step 4, best at step 3; call to resume it."""
    data = {"train": str(tmp_path / "train.json"), "eval": 2, "max_length": 128}
    ways = {"data": data, "duration": "6 steps", "eval_every": "3 steps", "checkpoint": {"every": "2 steps"}}
    code, log, _ = train(crash={"at": "step", "n": 5}, **ways)
    assert code == -9, log
    return lambda: train("--resume", **ways)


def test_on_resume_a_damaged_best_is_announced_and_forgotten(stopped, tmp_path):
    best = tmp_path / "out" / "checkpoint-3"
    damage(best, "adapter_model.safetensors")
    (fault,) = verify_checkpoint(best)
    assert fault.where == str(best / "adapter_model.safetensors")
    code, log, output = stopped()
    assert code == 0, log
    assert str(fault) in log
    assert json.loads((output / "checkpoint-6" / "state.json").read_text())["best"]["step"] == 6
    assert verify_checkpoint(output) == []


def test_twin_an_intact_best_is_kept_in_silence(stopped):
    code, log, output = stopped()
    assert code == 0, log
    assert str(output / "checkpoint-3" / "adapter_model.safetensors") not in log


def published_step(output):
    return json.loads((output / "MANIFEST.json").read_text())["identity"]["published_step"]


BEFORE = {"duration": "3 steps", "eval_at_start": True}


def test_where_no_answer_is_right_the_trained_weights_are_published(train):
    metrics = {"names": ["exact_match"], "max_new_tokens": 4}
    code, log, output = train("data.eval=2", metrics=metrics, checkpoint={"best": "exact_match"}, **BEFORE)
    assert code == 0, log
    assert published_step(output) == 3
    assert not gives(log, "checkpoint.best")


def test_untrained_weights_are_published_with_a_caution(train):
    """Twin of the test above: there the later step wins, here it has the higher loss."""
    optim = {"lr": 1000, "warmup": 0, "max_grad_norm": None}
    code, log, output = train("data.eval=2", optim=optim, **BEFORE)
    assert code == 0, log
    assert published_step(output) == 0
    losses = [row["eval_loss"] for row in read_rows(output / "trainer_log.jsonl") if "eval_loss" in row]
    (line,) = lines_giving(log, "checkpoint.best")
    assert all(gives(line, f"{loss:.4g}") for loss in losses)  # of step 0 and of the last


@pytest.mark.parametrize(("stage", "named"), [("grpo", True), ("sft", False)])
def test_the_best_of_a_run_with_rollouts_is_the_best_reward(stage, named):
    """checkpoint.best is the loss, which is minus the mean reward there. The twin's is a cross entropy."""
    rows = [
        {
            "current_steps": step,
            "eval_loss": -reward,
            "eval_reward": reward,
            "eval_response_tokens": 8,
            "eval_runtime": 0,
        }
        for step, reward in ((0, 0.5), (4, 0.25))
    ]
    of_stage = {"grpo": {"rewards": ["numeric"]}} if named else {}
    said = module._untrained(RunConfig(stage=stage, model="m", data={"train": "t"}, output="o", **of_stage), rows)
    assert gives(said, "reward") is named
    assert [f"{sign}{value}" in said for value in (0.5, 0.25) for sign in (" ", " -")] == [named, not named] * 2


def test_a_run_without_one_of_its_files_is_published_again(tmp_path):
    for name in ("adapter_model.safetensors", "README.md"):
        (tmp_path / name).write_text("as written")
    names = [tmp_path / "adapter_model.safetensors", tmp_path / "README.md"]
    durable.write_json(tmp_path / "MANIFEST.json", manifest(tmp_path, names, 3, {}))
    (tmp_path / "README.md").write_text("edited by its owner")
    assert is_published(tmp_path, 3)
    assert not is_published(tmp_path, 4)
    names[0].unlink()
    assert not is_published(tmp_path, 3)
