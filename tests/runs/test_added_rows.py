"""Runs that add a row for PAD, with embedding and head trained in full or not: each is resumed, opened and exported."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import raises_fault
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.methods.open_model import open_for_use
from surefoot.models import saved_adapter
from surefoot.report.verification import compare_folders
from surefoot.runs.export.model import export_model

ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 5)]
IDS = torch.tensor([[320, 5, 9, 77, 120, 33, 250, 4]])
FP32 = 1e-5  # logits of tiny models are below 10; two orders of the same sums
BASE_ROWS = 329
WEIGHTS = "adapter_model.safetensors"
PAIR = ("lm_head", "embed_tokens")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    for tied in (False, True):
        tiny_llama(folder / f"tied-{tied}", tied=tied)
    return folder


def train(place: Path, folder: Path, tied: bool, saved: list[str], **flags) -> Path:
    config = {
        "stage": "sft",
        "model": str(place / f"tied-{tied}"),
        "adapter": {"kind": "lora", "rank": 2, "targets": ["q_proj", "down_proj"], "modules_to_save": saved},
        "tokenizer": {"pad": "add"},
        "data": {"train": str(place / "rows.json")},
        "precision": "fp32",
        "batch": {"size": 2},
        "optim": {"lr": 1e-2},
        "duration": "2 steps",
        "checkpoint": {"every": "1 step"},
        "output": str(folder),
    }
    said = io.StringIO()
    assert surefoot.train(config, stream=said, **flags).finished, said.getvalue()
    return folder


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("tied", "saved"),
    representatives(
        [
            (False, []),
            (False, ["lm_head"]),
            (False, ["embed_tokens"]),
            (False, ["embed_tokens", "lm_head"]),
            (True, ["lm_head"]),
            (True, ["embed_tokens"]),
        ],
        (False, ["embed_tokens"]),
        (True, ["lm_head"]),
    ),
    ids=str,
)
def test_it_is_resumed_opened_and_exported(place, tmp_path, tied, saved):
    run = train(place, tmp_path / "run", tied, saved)
    whole = {name: value for name, value in load_file(run / WEIGHTS).items() if ".lora_" not in name}
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in whole} == set(PAIR)
    assert {len(value) for value in whole.values()} == {BASE_ROWS + 1}

    killed = Path(shutil.copytree(run, tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoint-2")
    (killed / "MANIFEST.json").unlink()
    train(place, killed, tied, saved, resume=True)
    assert compare_folders(run, killed) == []

    base = AutoModelForCausalLM.from_pretrained(place / f"tied-{tied}")
    base.resize_token_embeddings(BASE_ROWS + 1)
    wanted = logits(PeftModel.from_pretrained(base, run))
    for folder in (run, run / "checkpoint-2"):
        assert torch.equal(logits(open_for_use(str(folder)).model), wanted)
    export_model(str(run), tmp_path / "merged", merge=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - wanted).abs().max() < FP32
    assert json.loads((tmp_path / "merged" / "export.json").read_text())["tensors"]["added_rows"] == 1


@pytest.fixture(scope="module")
def both(place) -> Path:
    return train(place, place / "both", False, ["embed_tokens", "lm_head"])


def test_a_run_from_before_with_every_weight_three_times_opens_too(place, both, tmp_path):
    """PEFT itself writes such files."""
    old = Path(shutil.copytree(both, tmp_path / "old"))
    weights = load_file(old / WEIGHTS)
    for name in [name for name in weights if ".lora_" not in name]:
        front = name.removesuffix(".weight")
        weights[f"{front}.modules_to_save.weight"] = weights[name].clone()
        weights[f"{front}.original_module.weight"] = torch.zeros_like(weights[name])
    save_file(weights, old / WEIGHTS)
    assert torch.equal(logits(open_for_use(str(old)).model), logits(open_for_use(str(both)).model))


def test_twin_without_the_row_count_it_does_not_open(both, monkeypatch):
    monkeypatch.setattr(saved_adapter, "_vocabulary_rows", lambda tensors, facts: None)
    with raises_fault("SF-ADAPTER-FIT", f"{both}/adapter_model.safetensors"):
        open_for_use(str(both))


@pytest.mark.parametrize("gone", PAIR)
def test_twin_half_of_the_pair_is_refused(both, tmp_path, gone):
    half = Path(shutil.copytree(both, tmp_path / "half"))
    weights = {name: value for name, value in load_file(half / WEIGHTS).items() if gone not in name}
    save_file(weights, half / WEIGHTS)
    with raises_fault("SF-ADAPTER-FIT", f"{half}/adapter_model.safetensors"):
        open_for_use(str(half))


def test_an_embedding_with_fewer_rows_than_the_base_is_one_line(both, tmp_path):
    larger = tiny_llama(tmp_path / "larger", spare_rows=4)
    with raises_fault("SF-ADAPTER-FIT", f"{both}/adapter_model.safetensors"):
        open_for_use(str(larger), str(both))


def test_an_adapter_without_the_row_cannot_follow_one_with_it(place, both, tmp_path):
    """Over a base of 329 rows, which the first makes 330."""
    model = AutoModelForCausalLM.from_pretrained(place / "tied-False")
    weights = load_file(both / WEIGHTS)
    plain = Path(shutil.copytree(both, tmp_path / "plain"))
    save_file({name: t if ".lora_" in name else t[:BASE_ROWS].clone() for name, t in weights.items()}, plain / WEIGHTS)
    assert logits(open_for_use(str(place / "tied-False"), str(plain)).model).shape == logits(model).shape
    with raises_fault("SF-ADAPTER-FIT", f"{plain}/adapter_model.safetensors"):
        export_model(str(place / "tied-False"), tmp_path / "out", adapters=[str(both), str(plain)], merge=True)
