"""Training starts from a saved adapter (`adapter.initial`) exactly, and only from one of the same shape."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from helpers.adapter_runs import a_run
from helpers.faults import prints_fault
from helpers.trained_runs import heron_folder, heron_train, heron_trained
from surefoot.methods import policy
from surefoot.models.save import ADAPTER_WEIGHTS

STILL = {"lr": 1e-12, "weight_decay": 0.0}  # a step that moves no weight by more than MOVED
MOVED = 1e-9


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = heron_folder(tmp_path_factory.mktemp("initial"))
    a_run(folder / "saved", folder / "base")
    return folder


def adapter_of(world, **changes):
    saved = json.loads((world / "saved/adapter_config.json").read_text())
    shape = {
        "kind": "lora",
        "rank": saved["r"],
        "alpha": saved["lora_alpha"],
        "targets": sorted(saved["target_modules"]),
    }
    return {**shape, "initial": str(world / "saved"), **changes}


def check_start(world, name):
    heron_trained(world, name, duration="1 steps", optim=STILL, adapter=adapter_of(world))
    before, after = (load_file(world / folder / ADAPTER_WEIGHTS) for folder in ("saved", name))
    assert before.keys() == after.keys()
    assert all(torch.allclose(after[key], before[key], rtol=0, atol=MOVED) for key in before)


def test_the_first_step_starts_from_the_saved_weights(world):
    check_start(world, "one")


def test_twin_a_new_adapter_has_other_weights(world, monkeypatch):
    monkeypatch.setattr(policy, "start_from", lambda model, saved: None)
    with pytest.raises(AssertionError):
        check_start(world, "two")


@pytest.mark.parametrize(("changes", "value"), [({"alpha": 1}, 1), ({"rslora": True}, True), ({"kind": "dora"}, True)])
def test_another_scale_or_kind_is_refused(world, changes, value):
    result = heron_train(world, "three", duration="1 steps", adapter=adapter_of(world, **changes))
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-ADAPTER-FIT", world / "saved/adapter_config.json", value)


def test_other_modules_are_refused(world):
    result = heron_train(world, "four", duration="1 steps", adapter=adapter_of(world, targets=["q_proj"]))
    assert result.exit_code == 2
    assert prints_fault(result.output, "SF-ADAPTER-FIT", world / "saved" / ADAPTER_WEIGHTS)
