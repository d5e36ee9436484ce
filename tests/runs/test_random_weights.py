"""Runs that begin with random weights: drawn as transformers draws them by the seed, from a folder without any."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import surefoot
from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.methods.open_model import open_for_use
from surefoot.models.load import draw_model
from surefoot.report.verification import compare_folders


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("random")
    (folder / "texts.txt").write_text("\n\n".join(f"The sky is blue, {n} times." for n in range(8)))
    model = tiny_llama(folder / "m")
    for path in model.glob("*.safetensors"):
        path.unlink()
    return folder


def config(place: Path, folder: Path, **more) -> dict:
    return {
        "stage": "pretrain",
        "model": {"path": str(place / "m"), "weights": "random"},
        "data": {"train": str(place / "texts.txt")},
        "precision": "fp32",
        "batch": {"size": 1},
        "duration": "2 steps",
        "checkpoint": {"every": "1 step"},
        "seed": 5,
        "output": str(folder),
    } | more


def train(place: Path, folder: Path, **more) -> None:
    said, resume = io.StringIO(), more.pop("resume", False)
    assert surefoot.train(config(place, folder, **more), stream=said, resume=resume).finished, said.getvalue()


@pytest.mark.parametrize("seed", [5, 6])
def test_weights_are_those_of_transformers(place, seed):
    drawn = draw_model(
        place / "m", seed=seed, dtype=torch.float32, attention="sdpa", device=torch.device("cpu")
    ).state_dict()
    torch.manual_seed(5)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(place / "m"), dtype=torch.float32).state_dict()
    same = [torch.equal(one, theirs[name]) for name, one in drawn.items()]
    assert all(same) == (seed == 5)  # twin: another seed


def test_a_run_from_a_config_alone(place, tmp_path):
    train(place, tmp_path / "run")
    killed = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoint-2")
    (killed / "MANIFEST.json").unlink()
    train(place, killed, resume=True)
    assert compare_folders(tmp_path / "run", killed) == []
    ids = torch.tensor([[1, 5, 9, 77]])
    with torch.no_grad():
        found = open_for_use(str(tmp_path / "run")).model(input_ids=ids).logits
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "run")(input_ids=ids).logits
    assert torch.equal(found, again)
    log = [json.loads(line) for line in (tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()]
    assert log[0]["loss"] == pytest.approx(torch.log(torch.tensor(329.0)).item(), abs=0.3)  # all tokens about as likely


def test_without_random_such_a_folder_is_refused(place, tmp_path):
    with raises_fault("SF-MODEL-WEIGHTS", str(place / "m")):
        surefoot.train(config(place, tmp_path / "run", model=str(place / "m")), stream=io.StringIO())


@pytest.mark.parametrize("more", [{"adapter": {"kind": "lora"}}, {"stage": "dpo"}])
def test_what_begins_no_model_is_refused(place, tmp_path, more):
    with raises_fault("SF-CONFIG-CONFLICT", "model.weights"):
        surefoot.train(config(place, tmp_path / "run", **more), stream=io.StringIO())
