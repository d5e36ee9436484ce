"""Runs whose tokens have weights: evaluations report the cross entropy, and a run is resumed bit for bit."""

import io
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.report.verification import compare_folders

ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 5)]
FP32 = 1e-5  # sums of some tens of tokens in another order


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("losses")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    model = AutoModelForCausalLM.from_pretrained(tiny_llama(folder / "m"))
    model.lm_head.weight.data *= 20  # else every token is about as likely, and the weights are about equal
    model.save_pretrained(folder / "m")
    return folder


def config(place: Path, folder: Path, **more) -> dict:
    return {
        "stage": "sft",
        "model": str(place / "m"),
        "data": {"train": str(place / "rows.json"), "eval": str(place / "rows.json")},
        "precision": "fp32",
        "batch": {"size": 4},
        "duration": "2 steps",
        "checkpoint": {"every": "1 step"},
        "eval_at_start": True,
        "output": str(folder),
    } | more


def train(place: Path, folder: Path, *, resume: bool = False, **more) -> list[dict]:
    said = io.StringIO()
    assert surefoot.train(config(place, folder, **more), stream=said, resume=resume).finished, said.getvalue()
    return [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]


def first(rows: list[dict], name: str) -> float:
    return next(row[name] for row in rows if name in row)


def test_a_run_with_dft(place, tmp_path):
    usual = train(place, tmp_path / "usual")
    rows = train(place, tmp_path / "run", sft={"loss": "dft"}, kernels={"loss": "chunked"})
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())["plan"]
    assert plan["kernels"]["loss"]["value"] == "chunked"
    assert first(rows, "eval_loss") == pytest.approx(first(usual, "eval_loss"), rel=FP32)
    assert 0 < first(rows, "loss") < first(usual, "loss")  # of the same weights: each token's share of it is below 1

    killed = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoint-2")
    (killed / "MANIFEST.json").unlink()
    train(place, killed, resume=True, sft={"loss": "dft"}, kernels={"loss": "chunked"})
    assert compare_folders(tmp_path / "run", killed) == []


LORA = {"kind": "lora", "rank": 4}


@pytest.mark.parametrize(("reference", "more"), [("model", {}), ("adapter-off", {"adapter": LORA})])
def test_a_run_held_near_its_start(place, tmp_path, reference, more):
    more |= {"optim": {"lr": 1e-2}}
    near, free = more | {"sft": {"loss": "asft", "kl": 2.0}}, more | {"sft": {"loss": "dft"}}
    rows, loose = train(place, tmp_path / "run", **near), train(place, tmp_path / "free", **free)
    plans = [json.loads((tmp_path / name / "plan.json").read_text())["plan"] for name in ("run", "free")]
    assert (plans[0]["reference"]["value"], plans[1]["reference"]) == (reference, None)
    second = 4 * plans[0]["parameters"] if reference == "model" else 0
    assert [plan["memory"]["beside"] for plan in plans] == [second, 0]
    assert plans[0]["memory"]["logits"] > plans[1]["memory"]["logits"]
    apart = [row["divergence"] for row in rows if "loss" in row]
    assert apart[0] == 0 < apart[1]
    learned = [[row["loss"] for row in one if "loss" in row] for one in (rows, loose)]
    assert learned[0][0] == pytest.approx(learned[1][0], rel=FP32)
    assert learned[0][1] > learned[1][1]  # the same weights, since the first step's divergence is 0

    killed = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoint-2")
    (killed / "MANIFEST.json").unlink()
    train(place, killed, resume=True, **near)
    assert compare_folders(tmp_path / "run", killed) == []


def test_noise_reaches_the_policy(place, tmp_path):
    noisy = {"sft": {"loss": "asft"}, "optim": {"lr": 1e-2, "neftune_alpha": 50.0}, "adapter": LORA}
    assert first(train(place, tmp_path / "run", **noisy), "divergence") > 0


def test_a_loss_of_the_users_own_replaces_it(place, tmp_path):
    both = config(place, tmp_path / "run", sft={"loss": "dft"}, functions={"loss": "own.py:loss"})
    with raises_fault("SF-CONFIG-CONFLICT", "sft.loss"):
        surefoot.train(both, stream=io.StringIO())
    with raises_fault("SF-CONFIG-CONFLICT", "objective"):  # it would never see the reference
        config_of = config(place, tmp_path / "run", sft={"loss": "asft"})
        surefoot.train(config_of, stream=io.StringIO(), objective=lambda model, batch: None)


def test_constants_of_another_loss_are_refused(place, tmp_path):
    with raises_fault("SF-CONFIG-CONFLICT", "sft.alpha"):
        surefoot.train(config(place, tmp_path / "run", sft={"loss": "dft", "alpha": 2.0}), stream=io.StringIO())
