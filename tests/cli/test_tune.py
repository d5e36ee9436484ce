"""`surefoot tune` on a tiny model: real trials in real processes."""

from __future__ import annotations

import json

import pytest
import yaml
from click.testing import CliRunner

import zoo
from surefoot.cli.main import main as cli
from surefoot.config.load import load_config
from surefoot.tune import gate
from surefoot.tune.attempt import attempt

# All but the number of examples at once is set: a search of two settings.
CONFIG = """\
stage: sft
model: llama3
data: {train: train.json, max_length: 64, workers: 0, packing: off}
adapter: {kind: lora, rank: 4}
precision: fp32
attention: sdpa
compile: off
gradient_checkpointing: off
batch: {size: 2}
duration: 3 steps
output: runs/tuned
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    zoo.llama3(tmp_path / "llama3")
    rows = [{"instruction": f"say {n}", "output": f"it is {n}"} for n in range(9)]
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def tune(*words):
    return CliRunner().invoke(cli, ["tune", *words])


def test_a_config_and_a_picture_are_written_and_nothing_else(place):
    before = {path.name for path in place.iterdir()}
    result = tune("run.yaml", "--seconds", "0.5")
    assert result.exit_code == 0, result.output
    assert {path.name for path in place.iterdir()} - before == {"run-tuned.yaml", "run-tuned.png"}
    written = yaml.safe_load((place / "run-tuned.yaml").read_text(encoding="utf-8"))
    assert written["batch"]["micro"] in (1, 2, "auto")
    assert (written["batch"]["size"], written["precision"]) == (2, {"compute": "fp32"})
    assert load_config("run-tuned.yaml").config.output == "runs/tuned"
    assert "the plan's own choices" in result.output
    assert "not varied: precision.compute, the config sets it" in result.output
    assert "next: surefoot train run-tuned.yaml" in result.output
    again = tune("run.yaml")
    assert again.exit_code == 2
    assert "run-tuned.yaml: already exists" in again.output


def test_a_setting_whose_numbers_are_off_is_not_taken(place, monkeypatch):
    monkeypatch.setattr(gate, "LOSS_GATE", {"fp32": -1.0})
    result = tune("run.yaml", "batch.micro=2", "--seconds", "0.5")
    assert result.exit_code == 3, result.output
    assert "no setting passed" in result.output
    assert not (place / "run-tuned.yaml").exists()


def test_a_trial_that_cannot_run_says_why_in_one_sentence(place):
    (place / "empty.json").write_text("[]", encoding="utf-8")
    config = {**load_config("run.yaml").given, "data": {"train": {"path": "empty.json"}}}
    answer = attempt(config, steps=1, rounds=1, limit=None)
    assert answer.trial is None
    assert "empty.json" in answer.failure
    assert "\n" not in answer.failure


def test_a_trial_that_takes_too_long_is_ended(place):
    answer = attempt(load_config("run.yaml").given, steps=1, rounds=1, limit=0.2)
    assert (answer.trial, answer.failure) == (None, "not done after 0 s")
