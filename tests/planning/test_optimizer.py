"""The forecast of the optimizer's state against the state itself, byte for byte."""

import json
from pathlib import Path

import pytest
import torch

from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, run_config
from helpers.tiny_models import tiny_llama
from surefoot.config.schema import OptimConfig
from surefoot.planning import optimizer
from surefoot.planning.notes import Notes
from surefoot.planning.optimizer import Tensor, caution_rate, plan_optimizer, state_bytes
from surefoot.planning.plan import plan_from_json, plan_to_json
from surefoot.runs.load_models import load_models
from surefoot.runs.make_plan import make_plan
from surefoot.system import hardware

LORA = {"kind": "lora", "rank": 4}
OPTIMIZERS = [
    {"name": "adamw"},
    {"name": "adamw_8bit"},
    {"name": "adafactor"},
    {"name": "rmsprop", "momentum": 0.9},
    {"name": "rmsprop"},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9},
    {"name": "muon"},
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {"plain": tiny_llama(folder / "plain", hidden=64), "tied": tiny_llama(folder / "tied", hidden=64, tied=True)}


def planned_and_kept(base, optim, **request):
    """Bytes of the forecast, and those of the optimizer's state after a step."""
    config = run_config(
        model=str(base), data={"train": "unused.jsonl", "max_length": 64}, optim={"lr": 1e-3} | optim, **request
    )
    plan = make_plan(config)
    engine = load_models(config, plan, Path(base), None).engine
    for parameter in engine.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    engine.apply(1e-3, {}, None)
    counts = ("step", "RMS")
    kept = [tensor for name, tensor in engine.gather_state().items() if name.rpartition("/")[2] not in counts]
    return plan.memory.optimizer, sum(tensor.nbytes for tensor in kept)


def test_the_forecast_is_what_the_optimizer_keeps(bases):
    for request_ in [
        {"adapter": None},
        {"adapter": None, "tokenizer": {"pad": "add"}},
        {"adapter": LORA | {"rank": 64}},
        {"adapter": LORA | {"kind": "dora", "modules_to_save": ["lm_head", "norm"]}},
    ]:
        for optim in OPTIMIZERS:
            planned, kept = planned_and_kept(bases["plain"], optim, **request_)
            assert planned == kept


def test_a_tied_head_has_one_state(bases):
    for optim in OPTIMIZERS:
        planned, kept = planned_and_kept(bases["tied"], optim, adapter=None)
        assert planned == kept


def test_twin_the_forecast_of_another_optimizer_is_another(bases):
    others = [optim for optim in OPTIMIZERS if optim["name"] != "rmsprop"]  # as much as sgd with momentum, or as adamw
    sizes = [planned_and_kept(bases["plain"], optim, adapter=None)[0] for optim in others]
    assert len(set(sizes)) == len(sizes)


def test_bytes_by_hand():
    for optim, tensor, size in [
        ({"name": "adamw"}, Tensor((4096, 4096), True), 8 * 4096**2),
        ({"name": "adamw_8bit"}, Tensor((4096, 4096), True), 4096**2 * 2 + 4096**2 // 256 * 8 + 2048),
        ({"name": "adamw_8bit"}, Tensor((4096, 4096), False), 8 * 4096**2),
        ({"name": "adamw_8bit"}, Tensor((4095,), True), 8 * 4095),
        ({"name": "adafactor"}, Tensor((4096, 1024), True), 4 * 5120),
        ({"name": "adafactor"}, Tensor((4096,), True), 4 * 4096),
        ({"name": "rmsprop"}, Tensor((4096, 4096), True), 4 * 4096**2),
        ({"name": "rmsprop", "momentum": 0.9}, Tensor((4096,), True), 8 * 4096),
        ({"name": "sgd"}, Tensor((4096, 4096), True), 0),
        ({"name": "sgd", "momentum": 0.0}, Tensor((4096, 4096), True), 0),
        ({"name": "muon"}, Tensor((4096, 4096), True), 4 * 4096**2),
        ({"name": "muon"}, Tensor((4096, 4096), False), 8 * 4096**2),
    ]:
        assert state_bytes(OptimConfig(**optim), iter([tensor])) == size


def test_the_choice_says_who_made_it():
    assert plan_optimizer(OptimConfig()).source == "default"
    asked = plan_optimizer(OptimConfig(name="muon"))
    assert (asked.value, asked.source) == ("muon", "user")
    assert asked.reason.startswith("asked for")


def test_a_plan_that_was_saved_before_there_was_a_choice_says_adamw(tmp_path):
    folder = llama3_tokenizer(tmp_path)
    (folder / "config.json").write_text(json.dumps(LLAMA31_8B))
    plan = make_plan(run_config(model=str(folder)), hardware=hardware.preset("h100"))
    saved = plan_to_json(plan)
    assert plan_from_json(saved) == plan
    del saved["optimizer"]
    assert plan_from_json(saved).optimizer.value == "adamw"


def check_a_rate_beyond_the_weights_themselves_is_a_caution(name, lr, said):
    notes = Notes()
    caution_rate(OptimConfig(name=name, lr=lr), notes)
    assert [caution.partition(" lets ")[0] for caution in notes.cautions] == [f"optim.lr {lr:g}"] * said


def test_a_rate_beyond_the_weights_themselves_is_a_caution():
    for name, lr, said in [
        ("adamw", 1e20, True),
        ("muon", 0.2, True),
        ("adamw_8bit", 0.1, False),
        ("adafactor", 2e-4, False),
        ("sgd", 1.0, False),
    ]:
        check_a_rate_beyond_the_weights_themselves_is_a_caution(name, lr, said)


def test_twin_without_a_bound_it_is_not_said(monkeypatch):
    monkeypatch.setattr(optimizer, "_HIGHEST_RATE", float("inf"))
    with pytest.raises(AssertionError):
        check_a_rate_beyond_the_weights_themselves_is_a_caution("adamw", 1e20, True)
