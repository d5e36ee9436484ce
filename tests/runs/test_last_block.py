"""Whole runs in which the last decoder layer leaves out rows that nobody reads."""

import json

import pytest

from helpers.faults import lines_giving
from helpers.growing_records import sky_rows
from helpers.path_runs import fast_paths, forget, losses, path_config, saved_plan, start, weights
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.models.fast import last_block
from surefoot.runs.output_folder import Mode

PAIRS = [{"prompt": f"Say {n}.", "chosen": "sky " * n, "rejected": "sea"} for n in range(1, 9)]
LABELED = [{"prompt": f"Say {n}.", "completion": "sky " * n, "label": bool(n % 2)} for n in range(1, 9)]
SAME = 1e-4  # losses of four steps in fp32: rounding, which the optimizer carries on


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    rows = sky_rows(8)
    for name, records in {"sft": rows, "dpo": PAIRS, "reward": PAIRS, "kto": LABELED}.items():
        (folder / f"{name}.json").write_text(json.dumps(records))
    tiny_llama(folder / "base")
    return folder


def train(workplace, output, stage="sft", mode: Mode = "new", **way):
    usual = {"duration": "4 steps", "checkpoint": {"every": "2 steps", "keep": 3}, "optim": {"lr": 1e-2}}
    given = {"rows": f"{stage}.json", "data": {"eval": 2}, "stage": stage}
    return start(path_config(workplace, output, **(given | usual | way)), mode)


def recorded(folder):
    return fast_paths(folder).get("last_block"), saved_plan(folder).kernels.last_block


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
    uninterrupted = weights(folder, name)
    forget(folder, [4])
    train(workplace, folder, mode="resume", **way)
    assert weights(folder, name) == uninterrupted
    assert recorded(folder)[1].value == "pruned"


def test_twin_rows_in_another_order_take_it_out_again(workplace, tmp_path, monkeypatch):
    train(workplace, tmp_path / "plain", kernels={"last_block": "plain"})
    plain = last_block._spread
    monkeypatch.setattr(last_block, "_spread", lambda rows, places, shape: plain(rows, places.roll(1), shape))
    screen = train(workplace, tmp_path / "run")
    assert lines_giving(screen, "caution:", "kernels.last_block:", "pruned")
    found, choice = recorded(tmp_path / "run")
    assert not found["used"]
    assert (choice.value, choice.source) == ("plain", "measured")
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
