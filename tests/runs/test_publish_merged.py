"""adapter.publish: merged. The run folder then holds the whole model, which answers as base and adapter did."""

import json
import shutil

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from helpers.fork_server import ForkServer
from helpers.tiny_models import tiny_llama
from surefoot.config.load import load_config
from surefoot.methods.open_model import open_for_use
from surefoot.methods.provenance import saved_plan
from surefoot.report.verification import verify_folder
from surefoot.runs import publish as publish_merged
from surefoot.runs.output_folder import disk_of
from surefoot.system.folders import CERTIFICATE
from surefoot.training.checkpoint import verify_checkpoint
from surefoot.training.manifest import check_against

ROUNDING = 1e-5  # share of the largest logit: fp32 weights W + s B A in place of two products
HEADERS = 1.1  # of a model as small as this one
IDS = torch.tensor([[1, 5, 9, 12, 40, 7]])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run on a tiny Llama; trained with a rate at which the adapter matters."""
    folder = tmp_path_factory.mktemp("merged")
    tiny_llama(folder / "base", layers=2)
    rows = [{"instruction": f"say {n}", "output": f"it is {n}"} for n in range(12)]
    (folder / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    config = {
        "stage": "sft",
        "model": "base",
        "data": {"train": "train.json", "max_length": 64},
        "adapter": {"kind": "lora", "rank": 4, "publish": "merged"},
        "precision": "fp32",
        "optim": {"lr": 0.02},
        "batch": {"size": 4},
        "duration": "6 steps",
        "output": "run",
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    with ForkServer() as server:
        code = server.run(["train", "run.yaml"], folder / "log", folder=folder)
        assert code == 0, (folder / "log").read_text()
        resumed = server.run(["train", "run.yaml", "--resume"], folder / "log", folder=folder)
        assert resumed == 0, (folder / "log").read_text()
    return folder / "run"


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def test_the_folder_is_a_whole_model(run):
    model = AutoModelForCausalLM.from_pretrained(run)
    adapted = open_for_use(str(run / "checkpoint-6"))
    base = AutoModelForCausalLM.from_pretrained(run.parent / "base")
    wanted, found, before = logits(adapted.model), logits(model), logits(base)
    largest = wanted.abs().max()
    assert (found - wanted).abs().max() <= ROUNDING * largest
    assert (before - wanted).abs().max() > 100 * ROUNDING * largest  # twin: without the adapter it is seen


def test_the_adapter_stays_in_the_checkpoints_alone(run):
    assert not (run / "adapter_config.json").exists()
    assert not list(run.glob(".*"))[1:]  # the lock
    assert (run / "checkpoint-6" / "adapter_model.safetensors").is_file()
    assert verify_checkpoint(run) == []
    manifest = json.loads((run / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    assert {"model.safetensors", "config.json", "export.json", "tokenizer.json"} <= manifest.keys()


def test_verify_takes_it_as_a_run(run, tmp_path):
    """Checkpoints, published files and logs, though an export's certificate lies there; and that one is true."""
    checks = verify_folder(run)
    assert [check.name for check in checks] == ["checkpoint-6", "run", "logs"]
    assert not [fault for check in checks for fault in check.faults]
    outputs = json.loads((run / CERTIFICATE).read_text(encoding="utf-8"))["outputs"]
    assert "model.safetensors" in outputs
    assert not [check.fault for check in check_against(run, outputs) if check.fault]
    twin = tmp_path / "run"
    shutil.copytree(run, twin)
    with (twin / "checkpoint-6" / "adapter_model.safetensors").open("ab") as file:
        file.write(b"!")
    assert [check.name for check in verify_folder(twin) if check.faults] == ["checkpoint-6"]
    alone = shutil.copytree(run, tmp_path / "alone", ignore=shutil.ignore_patterns("checkpoint-*", "MANIFEST.json"))
    (check,) = verify_folder(alone)  # what anybody else has of it, an export
    assert (check.name, check.faults) == ("alone", [])


def test_the_forecast_of_the_disk_is_what_lies_there(run, tmp_path, monkeypatch):
    """Both copies of the model, but for their headers, while the first of them has not gone."""
    shutil.copytree(run.parent, tmp_path / "copy")
    folder = tmp_path / "copy" / "run"
    monkeypatch.chdir(folder.parent)  # where the config's base is
    (folder / "model.safetensors").unlink()
    lay = []

    def seen(path):
        lay.append(sum(file.stat().st_size for file in folder.glob("**/model.safetensors")))
        remove(path)

    remove = publish_merged.durable.remove
    monkeypatch.setattr(publish_merged.durable, "remove", seen)
    publish_merged.publish_merged(folder, folder / "checkpoint-6")
    config = load_config(folder / "config.yaml").config
    plan = saved_plan(folder)
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    tokenizer = sum((folder.parent / "base" / name).stat().st_size for name in names)
    model = disk_of(config, plan).model - tokenizer
    assert model < max(lay) < HEADERS * model
    adapter = load_config(folder / "config.yaml", ["adapter.publish=adapter"]).config
    assert disk_of(adapter, plan).model - tokenizer == 4 * plan.trainable < model / 2  # twin


def test_surefoot_and_the_card_take_it_as_whole(run):
    assert open_for_use(str(run)).base == run
    card = (run / "README.md").read_text(encoding="utf-8")
    assert "AutoModelForCausalLM.from_pretrained(folder)" in card
    assert "peft" not in card.split("## Data")[0]
