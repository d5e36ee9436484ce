"""Whole runs in which the last decoder layer leaves out rows that nobody reads."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from helpers.growing_records import sky_rows
from helpers.model_layouts import run_config
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.models.fast import last_block
from surefoot.planning.plan import plan_from_json
from surefoot.report.console import Console
from surefoot.runs.run import train_run
from surefoot.runs.run_folder import Mode

PAIRS = [{"prompt": f"Say {n}.", "chosen": "sky " * n, "rejected": "sea"} for n in range(1, 9)]
LABELLED = [{"prompt": f"Say {n}.", "completion": "sky " * n, "label": bool(n % 2)} for n in range(1, 9)]
SAME = 1e-4  # losses of four steps in fp32: rounding, which the optimizer carries on


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    rows = sky_rows(8)
    for name, records in {"sft": rows, "dpo": PAIRS, "reward": PAIRS, "kto": LABELLED}.items():
        (folder / f"{name}.json").write_text(json.dumps(records))
    tiny_llama(folder / "base")
    return folder


def train(workplace, output, stage="sft", mode: Mode = "new", **way):
    defaults = {
        "adapter": {"kind": "lora", "rank": 4},
        "duration": "4 steps",
        "batch": {"size": 4, "micro": 2},
        "checkpoint": {"every": "2 steps", "keep": 3},
        "optim": {"lr": 1e-2},
    }
    data = {"train": str(workplace / f"{stage}.json"), "eval": 2, "max_length": 64}
    wanted = run_config(stage=stage, model=str(workplace / "base"), data=data, output=str(output), **(defaults | way))
    screen = io.StringIO()
    assert train_run(wanted, mode, Console(screen)) == 0
    return " ".join(screen.getvalue().split())


def recorded(folder):
    [rank] = json.loads((folder / "environment.json").read_text())["ranks"]
    plan = plan_from_json(json.loads((folder / "plan.json").read_text())["plan"])
    return rank["fast_paths"].get("last_block"), plan.kernels.last_block


def losses(folder):
    lines = [json.loads(line) for line in (folder / "trainer_log.jsonl").read_text().splitlines()]
    return [line.get("loss", line.get("eval_loss")) for line in lines]


@pytest.mark.parametrize("stage", representatives(["sft", "dpo", "kto", "reward"], "sft", "kto"))
def test_a_run_is_the_plain_one(workplace, tmp_path, stage):
    for name in ("plain", "pruned"):
        train(workplace, tmp_path / name, stage, kernels={"last_block": name})
    found, choice = recorded(tmp_path / "pruned")
    assert (found["used"], choice.value) == (True, "pruned")
    assert found["differs"]["gradient"] <= found["limits"]["gradient"]
    assert recorded(tmp_path / "plain")[0] is None
    assert losses(tmp_path / "pruned") == pytest.approx(losses(tmp_path / "plain"), rel=SAME)


@pytest.mark.parametrize("way", [{}, {"gradient_checkpointing": "on", "adapter": None}], ids=str)
def test_it_goes_on_bit_for_bit(workplace, tmp_path, way):
    folder = tmp_path / "run"
    train(workplace, folder, **way)
    name = "model.safetensors" if way else "adapter_model.safetensors"
    weights = (folder / name).read_bytes()
    shutil.rmtree(folder / "checkpoint-4")
    train(workplace, folder, mode="resume", **way)
    assert (folder / name).read_bytes() == weights
    assert recorded(folder)[1].value == "pruned"


def test_twin_rows_in_another_order_take_it_out_again(workplace, tmp_path, monkeypatch):
    train(workplace, tmp_path / "plain", kernels={"last_block": "plain"})
    plain = last_block._spread
    monkeypatch.setattr(last_block, "_spread", lambda rows, places, shape: plain(rows, places.roll(1), shape))
    screen = train(workplace, tmp_path / "run")
    assert "caution: kernels.last_block: pruned differs from the plain path by" in screen
    found, choice = recorded(tmp_path / "run")
    assert not found["used"]
    assert (choice.value, choice.source) == ("plain", "measured")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
