"""Runs that add tokens: what they learn of them, resumed, opened, merged and as the reference sees them."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import surefoot
from helpers.faults import raises_fault
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.methods.open_model import open_for_use
from surefoot.report.verification import compare_folders
from surefoot.runs.export.model import export_model

TEXT = "<think> sky </think> blue <|im_end|>"
ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": TEXT} for n in range(1, 5)]
PAIRS = [{"prompt": f"Say {n}.", "chosen": TEXT, "rejected": f"no {n}"} for n in range(1, 5)]
BASE_ROWS = 329
NEW = {"<think>": 329, "</think>": 330, "<|im_start|>": 331, "<|im_end|>": 332}
FP32 = 1e-5  # logits of tiny models are below 10; two orders of the same sums
LORA = {"kind": "lora", "rank": 2, "targets": ["q_proj"]}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokens")
    for name, records in (("rows", ROWS), ("pairs", PAIRS)):
        (folder / f"{name}.json").write_text(json.dumps(records))
    for tied in (False, True):
        tiny_llama(folder / f"tied-{tied}", tied=tied)
    return folder


def train(place: Path, folder: Path, *, tied: bool = False, resume: bool = False, **more) -> Path:
    config = {
        "stage": "sft",
        "model": str(place / f"tied-{tied}"),
        "tokenizer": {"add": list(NEW)[:2], "add_special": list(NEW)[2:], "eos": "<|im_end|>"},
        "data": {"train": str(place / "rows.json"), "template": "chatml"},
        "precision": "fp32",
        "batch": {"size": 2},
        "optim": {"lr": 1e-2},
        "duration": "2 steps",
        "checkpoint": {"every": "1 step"},
        "output": str(folder),
    } | more
    said = io.StringIO()
    assert surefoot.train(config, stream=said, resume=resume).finished, said.getvalue()
    return folder


def saved_plan(run: Path) -> dict:
    return json.loads((run / "plan.json").read_text())["plan"]


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=torch.tensor([[320, 5, 329, 77, 330, 33, 332, 4]])).logits


@pytest.mark.parametrize(
    ("tied", "adapter"),
    representatives([(False, None), (True, None), (False, LORA), (True, LORA)], (False, None), (True, LORA)),
    ids=str,
)
def test_they_are_learned_resumed_opened_and_merged(place, tmp_path, tied, adapter):
    run = train(place, tmp_path / "run", tied=tied, adapter=adapter)
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert tokenizer.convert_tokens_to_ids(list(NEW)) == list(NEW.values())
    assert tokenizer.eos_token == "<|im_end|>"
    (part,) = json.loads((run / "data.json").read_text())["train"]["samples"][:1]
    assert sum(one["text"].count("<|im_end|>") for one in part["parts"] if one["control"]) == 2  # TEXT's stays text
    plan = saved_plan(run)
    assert plan["tokenizer"]["added_rows"] == len(NEW)

    killed = Path(shutil.copytree(run, tmp_path / "killed"))
    shutil.rmtree(killed / "checkpoint-2")
    (killed / "MANIFEST.json").unlink()
    train(place, killed, tied=tied, adapter=adapter, resume=True)
    assert compare_folders(run, killed) == []

    found = logits(open_for_use(str(run)).model)
    assert found.shape[-1] == BASE_ROWS + len(NEW)
    if adapter is None:
        assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(run)), found)
        return
    saved = {"embed_tokens"} if tied else {"embed_tokens", "lm_head"}
    assert set(plan["adapter"]["modules_to_save"]) == saved
    whole = [value for name, value in load_file(run / "adapter_model.safetensors").items() if ".lora_" not in name]
    assert {len(value) for value in whole} == {BASE_ROWS + len(NEW)}
    base = AutoModelForCausalLM.from_pretrained(place / f"tied-{tied}")
    base.resize_token_embeddings(BASE_ROWS + len(NEW))
    assert torch.equal(logits(PeftModel.from_pretrained(base, run)), found)
    export_model(str(run), tmp_path / "merged", merge=True)
    assert (logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) - found).abs().max() < FP32
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token == "<|im_end|>"


def test_one_module_that_the_config_names_is_enough(place, tmp_path):
    run = train(place, tmp_path / "run", adapter=LORA | {"modules_to_save": ["embed_tokens"]})
    assert saved_plan(run)["adapter"]["modules_to_save"] == ["embed_tokens"]


def test_the_reference_has_the_rows_too(place, tmp_path):
    """With all weights it is a second copy, drawn by the same seed: the first loss is log 2."""
    pairs = {"train": str(place / "pairs.json"), "template": "chatml"}
    train(place, tmp_path / "run", stage="dpo", data=pairs, alignment={"reference": "model"})
    first = json.loads((tmp_path / "run" / "trainer_log.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(0.693147, abs=1e-5)


def test_another_reference_must_have_the_tokens(place, tmp_path):
    pairs = {"train": str(place / "pairs.json"), "template": "chatml"}
    with raises_fault("SF-TOKENIZER", "alignment.reference"):
        surefoot.train(
            {
                "stage": "dpo",
                "model": str(place / "tied-False"),
                "tokenizer": {"add": ["<think>"]},
                "data": pairs | {"template": "alpaca"},
                "alignment": {"reference": str(place / "tied-True")},
                "output": str(tmp_path / "run"),
            },
            stream=io.StringIO(),
        )
