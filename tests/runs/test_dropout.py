"""The dropout that a run trains with, seen in its modules, its records and after a resume."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

import surefoot
from helpers import zoo
from helpers.faults import gives
from surefoot.config.schema import RunConfig
from surefoot.methods.policy import load_policy, trained_dropout
from surefoot.models.modes import highest_dropout
from surefoot.planning.plan import RunPlan
from surefoot.runs.make_plan import make_plan

OWN = 0.1  # gpt2's


def config_of(folder: Path, stage: str = "dpo", **changes) -> dict:
    if not (folder / "base").is_dir():
        zoo.gpt2(folder / "base")
        rows = [{"prompt": f"Say {n}.", "chosen": f"{n} birds", "rejected": "no"} for n in range(6)]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "stage": stage,
        "model": str(folder / "base"),
        "data": {"train": str(folder / "pairs.jsonl"), "max_length": 64, "template": "plain"},
        "batch": {"size": 2},
        "optim": {"lr": 1e-3},
        "precision": "fp32",
        "duration": "2 steps",
        "checkpoint": {"every": "1 step"},
        "output": str(folder / "run"),
        **changes,
    }


def loaded(config: RunConfig, plan: RunPlan) -> float:
    return highest_dropout(load_policy(config, plan, Path(config.model.path), None, torch.device("cpu")))


@pytest.mark.parametrize(("share", "found"), [(None, 0.0), ("own", OWN), (0.3, 0.3)])
def test_the_modules_do_what_the_plan_says(tmp_path, share, found):
    raw = config_of(tmp_path)
    config = RunConfig.model_validate({**raw, "model": {"path": raw["model"], "dropout": share}})
    plan = make_plan(config, measure=False)
    assert loaded(config, plan) == pytest.approx(found)
    cautions = " ".join(plan.cautions)
    assert ("model.dropout: 0" in cautions) == (found > 0)


OLDER = [
    ("dpo", None, None, None),
    ("dpo", None, 0.2, 0.2),
    ("ppo", None, None, 0.0),
    ("ppo", 0.1, None, None),
    ("ppo", None, 0.2, 0.2),
    ("sft", None, None, None),
]


@pytest.mark.parametrize(("stage", "of_adapter", "asked", "share"), OLDER)
def test_a_plan_from_before_the_choice_means_what_it_did(tmp_path, stage, of_adapter, asked, share):
    raw = config_of(tmp_path, "dpo")
    raw |= {"adapter": {"kind": "lora", "dropout": of_adapter or 0.0}}
    plan = replace(make_plan(RunConfig.model_validate(raw), measure=False), dropout=None)
    config = RunConfig.model_validate({**raw, "stage": stage, "model": {"path": raw["model"], "dropout": asked}})
    assert trained_dropout(config, plan) == share


def forget(run: Path) -> None:
    """As if a run with `model.dropout: own` had been planned before there was the word: null meant it."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["dropout"] = None
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    saved = json.loads((run / "plan.json").read_text())
    del saved["plan"]["dropout"]
    (run / "plan.json").write_text(json.dumps(saved))


def resumed(config: dict, monkeypatch, **changes) -> tuple[float, str]:
    """(highest dropout while it trained, what was said)"""
    seen: list[float] = []

    def watched(*arguments):
        model = load_policy(*arguments)
        seen.append(highest_dropout(model))
        return model

    monkeypatch.setattr("surefoot.runs.load_models.load_policy", watched)
    said = io.StringIO()
    surefoot.train({**config, "duration": "3 steps", **changes}, resume=True, stream=said)
    return seen[-1], said.getvalue()


def test_a_run_saved_earlier_keeps_the_dropout_it_had(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    surefoot.train({**config, "model": {"path": config["model"], "dropout": "own"}}, stream=io.StringIO())
    forget(tmp_path / "run")
    share, said = resumed(config, monkeypatch)
    assert share == pytest.approx(OWN)
    assert "model.dropout changed" not in said


def test_twin_a_plan_of_today_has_none(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    surefoot.train(config, stream=io.StringIO())
    assert resumed(config, monkeypatch)[0] == 0.0


def test_a_changed_word_is_said_and_done(tmp_path, monkeypatch):
    config = config_of(tmp_path)
    surefoot.train(config, stream=io.StringIO())
    share, said = resumed(config, monkeypatch, model={"path": config["model"], "dropout": "own"})
    assert share == pytest.approx(OWN)
    assert any(gives(line, "model.dropout") and gives(line, "own") for line in said.splitlines())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert plan["dropout"]["value"] == "own"
