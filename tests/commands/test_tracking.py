"""Trackers in a whole run: the numbers of the log, the same run after a resume, and refusals before anything starts."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from helpers.faults import prints_fault
from helpers.fork_server import ForkServer
from helpers.tiny_models import tiny_llama
from surefoot.commands.main import main

RECORDS = [{"instruction": f"Say heron {k} times.", "input": "", "output": "heron " * k} for k in range(1, 9)]
FLOAT32 = 1e-6  # relative: TensorBoard keeps single precision


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("models") / "base")


def write_config(folder: Path, base: Path, **changes: Any) -> Path:
    (folder / "train.json").write_text(json.dumps(RECORDS))
    config = {
        "stage": "sft",
        "model": str(base),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": str(folder / "train.json"), "eval": 2, "max_length": 64},
        "batch": {"size": 4},
        "duration": "2 steps",
        "report_to": ["tensorboard", "wandb"],
        "tracking": {"offline": True},
        "output": str(folder / "run"),
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_tracker_runs(base: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    path, run, log = write_config(tmp_path, base), tmp_path / "run", tmp_path / "log.txt"
    with ForkServer() as server:
        assert server.run(["train", str(path)], log) == 0, log.read_text()
        assert server.run(["train", str(path), "--resume", "duration=4 steps"], log) == 0, log.read_text()
    first, second = (json.loads((run / f"checkpoint-{step}" / "state.json").read_text()) for step in (2, 4))
    assert set(first["trackers"]) == {"tensorboard", "wandb"}
    assert first["trackers"] == second["trackers"]
    folders = [folder.name.rpartition("-")[2] for folder in (run / "wandb").glob("offline-run-*")]
    assert set(folders) == {first["trackers"]["wandb"]}

    shown = EventAccumulator(str(run / "tensorboard"))
    shown.Reload()
    rows = [json.loads(line) for line in (run / "trainer_log.jsonl").read_text().splitlines()]
    losses = [(row["current_steps"], row["loss"]) for row in rows if "loss" in row]
    assert [one.step for one in shown.Scalars("train/loss")] == [1, 2, 3, 4]
    seen = [(one.step, pytest.approx(one.value, rel=FLOAT32)) for one in shown.Scalars("train/loss")]
    assert losses == seen
    assert {one.step for one in shown.Scalars("eval/loss")} == {2, 4}


def test_the_plan_shows_them(base: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(write_config(tmp_path, base))])
    assert result.exit_code == 0
    assert "report_to" in result.stdout
    assert "tensorboard, wandb" in result.stdout


def test_what_is_not_installed_is_refused_at_plan_time(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.report.trackers.adapters.is_installed", lambda name: name != "wandb")
    for command in ("plan", "train"):
        path = write_config(tmp_path, base)
        result = CliRunner().invoke(main, [command, str(path)])
        assert result.exit_code == 3
        assert prints_fault(result.stderr, "SF-PACKAGE", f"{path}:14:1: error: report_to", "wandb")
        assert not (tmp_path / "run").exists()
