"""What is published was verified first."""

from __future__ import annotations

import json

import pytest
import yaml

from helpers.faults import raises_fault
from helpers.fork_server import ForkServer
from helpers.tiny_models import tiny_llama
from helpers.toy_model import save_checkpoint, toy_engine
from surefoot.runs import publish as module
from surefoot.runs.publish import chosen_step
from surefoot.training.checkpoint import verify_checkpoint
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


def check_a_damaged_best(run):
    damage(run / "checkpoint-2")
    step, cautions = chosen_step(run, ENDED, keep_best=True)
    assert step == 4
    assert "checkpoint-2/state.json" in cautions[0]
    assert "checkpoint-4, the last, is published" in cautions[1]


def test_a_damaged_best_is_not_published_and_named(run):
    check_a_damaged_best(run)


def test_twin_without_verification_it_would_be(run, monkeypatch):
    monkeypatch.setattr(module, "verify_checkpoint", lambda folder: [])
    with pytest.raises(AssertionError):
        check_a_damaged_best(run)


@pytest.mark.parametrize("best", [None, Best(2, 0.5), Best(4, 0.5)])
def test_a_damaged_last_one_ends_the_run(run, best):
    damage(run / "checkpoint-2")
    damage(run / "checkpoint-4")
    code = "SF-CHECKPOINT-DAMAGED"
    with raises_fault(code, f"{run}/checkpoint-4/state.json", also=[(code, run)]):
        chosen_step(run, RunState(step=4, best=best), keep_best=True)


@pytest.fixture
def stopped(tmp_path):
    """A run that was killed after step 4, best at step 3; resuming it returns exit code, output folder and log."""
    base = tiny_llama(tmp_path / "base")
    rows = [{"instruction": f"Say {k}.", "input": "", "output": "heron " * k} for k in range(1, 7)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    output, log, path = tmp_path / "out", tmp_path / "log.txt", tmp_path / "run.yaml"
    config = {
        "stage": "sft",
        "model": str(base),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(tmp_path / "train.json"), "eval": 2, "max_length": 128},
        "batch": {"size": 2},
        "duration": "6 steps",
        "eval_every": "3 steps",
        "checkpoint": {"every": "2 steps"},
        "output": str(output),
    }
    path.write_text(yaml.safe_dump(config))
    with ForkServer() as server:
        assert server.run(["train", str(path)], log, {"at": "step", "n": 5}) == -9, log.read_text()
        yield lambda: (server.run(["train", str(path), "--resume"], log), output, log.read_text())


def test_on_resume_a_damaged_best_is_announced_and_forgotten(stopped, tmp_path):
    damage(tmp_path / "out" / "checkpoint-3", "adapter_model.safetensors")
    code, output, log = stopped()
    assert code == 0, log
    assert "checkpoint-3/adapter_model.safetensors: has another content" in " ".join(log.split())
    assert "the next evaluation sets a new one" in " ".join(log.split())
    assert json.loads((output / "checkpoint-6" / "state.json").read_text())["best"]["step"] == 6
    assert verify_checkpoint(output) == []


def test_twin_an_intact_best_is_kept_in_silence(stopped):
    code, _, log = stopped()
    assert code == 0, log
    assert "the best checkpoint is lost" not in " ".join(log.split())


@pytest.fixture(scope="module")
def server():
    with ForkServer() as running:
        yield running


@pytest.fixture
def train(server, tmp_path):
    """Run `surefoot train` with evaluation before step 1; exit code, what it said, output folder."""
    base, log = tiny_llama(tmp_path / "base"), tmp_path / "log.txt"
    rows = [{"instruction": f"Say {k}.", "input": "", "output": "heron " * k} for k in range(1, 9)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    config = {
        "stage": "sft",
        "model": str(base),
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(tmp_path / "train.json"), "eval": 2, "max_length": 128},
        "batch": {"size": 2},
        "duration": "3 steps",
        "eval_at_start": True,
        "output": str(tmp_path / "out"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))

    def train(*arguments):
        log.write_text("")
        code = server.run(["train", str(tmp_path / "run.yaml"), *arguments], log)
        return code, " ".join(log.read_text().split()), tmp_path / "out"

    return train


def published_step(output):
    return json.loads((output / "MANIFEST.json").read_text())["identity"]["published_step"]


def test_where_no_answer_is_right_the_trained_weights_are_published(train):
    code, log, output = train("metrics.names=[exact_match]", "metrics.max_new_tokens=4", "checkpoint.best=exact_match")
    assert code == 0, log
    assert published_step(output) == 3
    assert "weights of step 0" not in log


def test_untrained_weights_are_published_with_a_caution(train):
    """Twin of the test above: there the later step wins, here it has the higher loss."""
    code, log, output = train("optim.lr=1000", "optim.warmup=0", "optim.max_grad_norm=null")
    assert code == 0, log
    assert published_step(output) == 0
    assert "published are the weights of step 0, before any training: no later evaluation had a better" in log
