"""What a Python caller brings: checked before step 1, known again on resume, and never the end of a run."""

import json

import pytest
import torch

import surefoot
from helpers.faults import lines_giving, raises_fault
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.methods.losses.sft import sft_loss
from surefoot.report import observer as observer_module
from surefoot.runs import custom as custom_module
from surefoot.runs import identity as identity_module
from surefoot.runs import prepare as prepare_module

ROWS = [{"instruction": f"Say sky {n} times.", "output": "sky " * n} for n in range(1, 13)]


@pytest.fixture
def config(tmp_path):
    (tmp_path / "train.json").write_text(json.dumps(ROWS))
    return {
        "stage": "sft",
        "model": str(tiny_llama(tmp_path / "base")),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": str(tmp_path / "train.json"), "eval": 4},
        "batch": {"size": 4},
        "duration": "2 steps",
        "output": str(tmp_path / "run"),
    }


TEXTS = [{"text": "The sky is above. " * n} for n in range(1, 13)]
GENERATE = {"metrics.names": {"metrics": {"names": ["exact_match"]}}, "samples.count": {"samples": {"count": 2}}}


@pytest.mark.parametrize("key", representatives(GENERATE, "samples.count"))
def test_texts_ask_nothing_so_no_answers_are_generated_to_them(config, tmp_path, key):
    surefoot.train(config | GENERATE[key])
    (tmp_path / "train.json").write_text(json.dumps(TEXTS))
    with raises_fault("SF-CONFIG-CONFLICT", key):
        surefoot.train(config | GENERATE[key] | {"output": str(tmp_path / "texts")})
    assert not (tmp_path / "texts").exists()


def test_twin_without_the_check_a_metric_of_texts_is_logged(config, tmp_path, monkeypatch):
    (tmp_path / "train.json").write_text(json.dumps(TEXTS))
    monkeypatch.setattr(prepare_module, "check_answers", lambda config, data: None)
    result = surefoot.train(config | GENERATE["metrics.names"])
    assert any("eval_exact_match" in row for row in rows(result))


def doubled(model, batch):
    found = sft_loss(model, batch)
    return surefoot.LossSum(2 * found.loss, {"doubled": 2 * found.loss.detach()})


def rows(result):
    return [json.loads(line) for line in (result.folder / "trainer_log.jsonl").read_text().splitlines()]


def test_an_objective_takes_the_place_of_the_loss_and_its_sums_are_logged(config, tmp_path):
    usual = surefoot.train(config)
    twice = surefoot.train(config | {"output": str(tmp_path / "twice")}, objective=doubled)
    assert rows(twice)[0]["loss"] == 2 * rows(usual)[0]["loss"]
    assert twice.results["eval_doubled"] == pytest.approx(twice.results["eval_loss"])


def test_only_a_cross_entropy_is_compared_with_guessing(config, tmp_path, monkeypatch):
    """Any first loss would be a caution here."""
    monkeypatch.setattr(observer_module, "_WORSE", -1e3)

    def said(name: str, *, objective=None, **more) -> int:
        surefoot.train(config | {"duration": "1 step", "output": str(tmp_path / name)} | more, objective=objective)
        events = map(json.loads, (tmp_path / name / "events.jsonl").read_text().splitlines())
        return sum(event["kind"] == "caution" and event["step"] == 1 for event in events)

    assert said("sft") == 1
    assert said("own", objective=doubled) == 0
    assert said("distill", stage="distill", distill={"teacher": config["model"]}) == 0


def test_a_run_with_its_own_loss_is_not_continued_with_another(config):
    surefoot.train(config, objective=doubled)
    longer = config | {"duration": "4 steps"}
    with raises_fault("SF-RESUME-CHANGED", f"{config['output']}/checkpoint-2"):
        surefoot.train(longer, resume=True)
    assert surefoot.train(longer, resume=True, objective=doubled).finished


def test_twin_a_loss_that_is_not_remembered_is_swapped_in_silence(config, monkeypatch):
    monkeypatch.setattr(custom_module.Custom, "objective_name", None)
    surefoot.train(config, objective=doubled)
    first = surefoot.train(config | {"duration": "4 steps"}, resume=True)
    losses = [row["loss"] for row in rows(first) if "loss" in row]
    assert losses[1] > 1.5 * losses[2]
    assert "objective" not in identity_module._MUST_MATCH


@pytest.mark.parametrize(
    "objective",
    [
        lambda model, batch: sft_loss(model, batch).loss,
        lambda model, batch: surefoot.LossSum(torch.zeros(2)),
        lambda model, batch: surefoot.LossSum(torch.zeros(()), {"loss": torch.zeros(())}),
    ],
    ids=["a tensor", "two losses", "a name that is taken"],
)
def test_a_wrong_objective_is_said_before_the_first_step(config, objective, tmp_path):
    with raises_fault("SF-OWN-FUNCTION", "objective"):
        surefoot.train(config, objective=objective)
    assert not (tmp_path / "run" / "trainer_log.jsonl").exists()


def test_a_metric_that_fails_is_said_and_ends_nothing(config, capsys):
    result = surefoot.train(config | {"metrics": {"names": ["broken"]}}, metrics={"broken": lambda answers: 1 / 0})
    assert result.results["eval_broken"] is None
    assert lines_giving(capsys.readouterr().out, "broken", 2, "ZeroDivisionError")
    (row,) = [row for row in rows(result) if "eval_loss" in row]
    assert row["eval_broken"] is None
    assert row["non_finite"] == "eval_broken"


@pytest.mark.parametrize(
    ("name", "near"),
    [("loss", []), ("exact_mach", ["exact_match"])],
)
def test_names_of_metrics_are_checked(config, name, near):
    with raises_fault("SF-OWN-FUNCTION", "metrics.names", remedy=near):
        surefoot.train(config | {"metrics": {"names": [name]}})
