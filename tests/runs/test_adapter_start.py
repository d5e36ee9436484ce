"""Runs whose adapter starts from the base's weights: first the base's answers, PEFT's folder, resumed bit for bit."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import surefoot
from helpers.faults import raises_fault
from helpers.tiny_models import tiny_llama
from surefoot.config.load import check_config
from surefoot.methods.open_model import open_for_use
from surefoot.report.verification import compare_folders
from surefoot.system.errors import InputError

ROWS = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 5)]
FP32 = 1e-4  # products of tiny matrices in fp32, in two orders
LORA = {"kind": "lora", "rank": 4, "alpha": 6.0}
PISSA = LORA | {"start": "pissa", "start_iterations": 4}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("starts")
    (folder / "rows.json").write_text(json.dumps(ROWS))
    tiny_llama(folder / "m")
    return folder


def config(place: Path, output: Path, adapter: dict, **more) -> dict:
    return {
        "stage": "sft",
        "model": str(place / "m"),
        "data": {"train": str(place / "rows.json"), "eval": str(place / "rows.json")},
        "adapter": adapter,
        "precision": "fp32",
        "optim": {"lr": 1e-2},
        "batch": {"size": 4},
        "duration": "2 steps",
        "eval_at_start": True,
        "checkpoint": {"every": "1 step"},
        "output": str(output),
    } | more


def train(given: dict, **how) -> dict[str, list[float]]:
    said = io.StringIO()
    assert surefoot.train(given, stream=said, **how).finished, said.getvalue()
    rows = [json.loads(line) for line in (Path(given["output"]) / "trainer_log.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in rows if name in row] for name in ("loss", "eval_loss", "grad_norm")}


@pytest.mark.parametrize("adapter", [PISSA, LORA | {"start": "olora", "rslora": True}])
def test_a_run(place, tmp_path, adapter):
    whole, cut = tmp_path / "run", tmp_path / "cut"
    found = train(config(place, whole, adapter))
    plain = train(config(place, tmp_path / "plain", LORA))
    for name in ("eval_loss", "loss"):
        assert found[name][0] == pytest.approx(plain[name][0], rel=FP32)  # the base's
    assert found["grad_norm"][0] != pytest.approx(plain["grad_norm"][0], rel=0.1)  # twin: B is not 0
    assert found["eval_loss"][-1] < found["eval_loss"][0]

    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoint-2")
    (cut / "MANIFEST.json").unlink()
    train(config(place, cut, adapter), resume=True)
    assert compare_folders(whole, cut) == []

    ids = torch.arange(3, 19)[None]
    opened = open_for_use(str(whole))
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(place / "m"), whole).eval()
    with torch.no_grad():
        ours, theirs = opened.model(input_ids=ids).logits, peft(input_ids=ids).logits
    assert (ours - theirs).abs().max() <= FP32 * theirs.abs().max()
    assert peft.peft_config["default"].r == 8
    plans = [json.loads((folder / "plan.json").read_text())["plan"] for folder in (whole, tmp_path / "plain")]
    assert plans[0]["trainable"] == plans[1]["trainable"]
    assert plans[0]["memory"]["beside"] == 4 * plans[0]["trainable"]


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"adapter": PISSA | {"kind": "dora"}}, "adapter.start"),
        ({"adapter": PISSA | {"initial": "other"}}, "adapter.start"),
        ({"adapter": LORA | {"start": "olora", "start_iterations": 4}}, "adapter.start_iterations"),
        ({"precision": {"base": "nf4"}}, "adapter.start"),
        ({"stage": "dpo"}, "adapter.start"),
        ({"sft": {"loss": "asft"}}, "adapter.start"),
    ],
)
def test_what_it_does_not_go_with(place, tmp_path, more, key):
    given = config(place, tmp_path / "run", PISSA) | more
    with pytest.raises(InputError) as caught:
        check_config(given, files=False)
    assert key in [fault.where for fault in caught.value.faults]
    check_config(config(place, tmp_path / "run", PISSA) | {"stage": "dpo", "alignment": {"loss": "orpo"}}, files=False)


def test_a_rank_without_factors(place, tmp_path):
    with raises_fault("SF-CONFIG-CONFLICT", "adapter.rank"):
        surefoot.train(config(place, tmp_path / "run", PISSA | {"rank": 65}), stream=io.StringIO())
