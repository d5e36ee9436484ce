"""Runs with surefoot's own norms and turns: used and recorded, exact on resume, taken out where they differ."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace

import pytest
import torch

from helpers.growing_records import write_sky
from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.kernels import forms
from surefoot.models.fast.pointwise import pointwise_path
from surefoot.planning.measurements import PointwiseSizes, PointwiseTrial
from surefoot.planning.precision import NARROW
from surefoot.planning.probes import child
from surefoot.planning.probes.kept import Kept
from surefoot.planning.probes.pointwise import PointwiseRequest
from surefoot.planning.serial import plan_from_json
from surefoot.report.console import Console
from surefoot.runs import planned
from surefoot.runs.measured import measured_pointwise
from surefoot.runs.planned import make_plan
from surefoot.runs.run import train_run
from surefoot.runs.run_folder import Mode
from surefoot.system.errors import EnvironmentFault
from surefoot.system.hardware import preset

FUSED = {"pointwise": "fused"}
FASTER = (PointwiseTrial("norm", 0.02, 0.01, ""), PointwiseTrial("rotary", 0.02, 0.01, ""))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_sky(folder, 8)
    tiny_llama(folder / "base")
    tiny_llama(folder / "wide", hidden=NARROW)
    return folder


def config(workplace, output, base="base", **way):
    defaults = {
        "adapter": {"kind": "lora", "rank": 4},
        "duration": "2 steps",
        "batch": {"size": 4, "micro": 2},
        "checkpoint": {"every": "1 step", "keep": 2},
    }
    data = {"train": str(workplace / "rows.json"), "max_length": 64} | way.pop("data", {})
    return run_config(model=str(workplace / base), data=data, output=str(output), **(defaults | way))


def train(wanted, mode: Mode = "new"):
    screen = io.StringIO()
    assert train_run(wanted, mode, Console(screen), typed=()) == 0
    return " ".join(screen.getvalue().split())


def recorded(folder):
    """What environment.json says of the path, and what plan.json does."""
    [rank] = json.loads((folder / "environment.json").read_text())["ranks"]
    plan = plan_from_json(json.loads((folder / "plan.json").read_text())["plan"])
    return rank["fast_paths"].get("pointwise"), plan.kernels.pointwise


def weights(folder, name="adapter_model.safetensors"):
    return (folder / name).read_bytes()


def losses(folder):
    return [json.loads(line).get("loss") for line in (folder / "trainer_log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"adapter": None},
        {"data": {"packing": "on"}, "bos": {"scale": 0.5}},
        {"gradient_checkpointing": "on", "adapter": {"kind": "dora", "rank": 4}},
    ],
    ids=str,
)
def test_a_run_that_asks_for_it_has_it(workplace, tmp_path, way):
    train(config(workplace, tmp_path / "run", kernels=FUSED, **way))
    found, choice = recorded(tmp_path / "run")
    assert found["used"]
    assert 0 < found["differs"]["gradient"] < found["limits"]["gradient"]
    assert choice.value == "fused"
    train(config(workplace, tmp_path / "plain", kernels={"pointwise": "plain"}, **way))
    assert recorded(tmp_path / "plain") == (None, recorded(tmp_path / "plain")[1])
    rough = way.get("precision") in ("bf16", "fp16")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-2 if rough else 1e-4)


def test_an_interrupted_run_goes_on_bit_for_bit(workplace, tmp_path):
    wanted = config(workplace, tmp_path / "run", kernels=FUSED)
    train(wanted)
    uninterrupted = weights(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-2")
    train(wanted, "resume")
    assert recorded(tmp_path / "run")[0]["used"]
    assert weights(tmp_path / "run") == uninterrupted
    train(config(workplace, tmp_path / "plain", kernels={"pointwise": "plain"}))
    assert weights(tmp_path / "plain") != uninterrupted  # twin: the plain path has other last bits


def break_norm(monkeypatch):
    right = forms.BLOCKS

    def wrong(*given, **how):
        dx, dw = right.norm_backward(*given, **how)
        return dx * 2, dw

    monkeypatch.setattr(forms, "BLOCKS", replace(right, norm_backward=wrong))


def test_one_that_was_asked_for_and_differs_ends_the_run(workplace, tmp_path, monkeypatch):
    break_norm(monkeypatch)
    with pytest.raises(EnvironmentFault, match=r"kernels\.pointwise: differs from the plain path"):
        train(config(workplace, tmp_path / "run", kernels=FUSED))
    assert not (tmp_path / "run").exists()


def test_one_that_was_measured_and_differs_is_taken_out(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr(planned, "measured_pointwise", lambda *asked: FASTER)
    fused = config(workplace, tmp_path / "fused", base="wide", precision="fp32")
    train(fused)
    assert recorded(tmp_path / "fused")[1].value == "fused"
    break_norm(monkeypatch)
    screen = train(config(workplace, tmp_path / "run", base="wide", precision="fp32"))
    assert "caution: kernels.pointwise: fused differs from the plain path by" in screen
    found, choice = recorded(tmp_path / "run")
    assert (found["used"], choice.value, choice.source) == (False, "plain", "measured")
    train(config(workplace, tmp_path / "plain", base="wide", precision="fp32", kernels={"pointwise": "plain"}))
    assert weights(tmp_path / "run") == weights(tmp_path / "plain") != weights(tmp_path / "fused")


def test_on_a_gpu_gates_are_measured_besides_and_the_plan_says_by_what(workplace, tmp_path, monkeypatch):
    """A machine with a GPU is described; what its probes would say is given."""
    asked = []

    def measured(request, kept):
        asked.append((request.sizes.width, request.sizes.gate, request.device))
        return (*FASTER, PointwiseTrial("gate", 0.02, 0.01, ""))

    monkeypatch.setattr(planned.machine, "detect", lambda: replace(preset("h100"), preset=False, triton=True))
    monkeypatch.setattr(planned, "measured_pointwise", measured)
    monkeypatch.setattr(planned, "measured_products", lambda *asked: {"fp32": 1e13, "bf16": 1e14})
    monkeypatch.setattr(planned.machine, "forget_peak", lambda kind: None)
    monkeypatch.setattr(planned, "measured_tf32", lambda *asked: None)
    monkeypatch.setattr(planned, "measured_attention", lambda *asked: ())
    plan = make_plan(config(workplace, tmp_path / "run", base="wide"))
    choice = plan.kernels.pointwise
    assert (choice.value, choice.source) == ("fused", "measured")
    assert "norms, turns and gate, forward and backward here: plain 80, fused 40 by Triton" in choice.reason
    [(width, gate, device)] = asked
    assert (width, device) == (NARROW, "cuda")
    assert gate == json.loads((workplace / "wide" / "config.json").read_text())["intermediate_size"]


def without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "surefoot.kernels.triton_pointwise", raising=False)


def test_a_triton_that_does_not_load_is_a_trial_that_failed_and_is_tried_again(tmp_path, monkeypatch):
    """Before any kernel runs, so that no GPU is needed to see it, nor a process of its own."""
    without_triton(monkeypatch)
    monkeypatch.setattr(child, "run_in_child", child.run_request)
    kept = Kept(tmp_path, {})
    request = PointwiseRequest(("norm", "rotary", "gate"), PointwiseSizes(256, 4, 64, gate=512), "bf16", "cuda")
    trials = measured_pointwise(request, kept)
    assert [trial.part for trial in trials] == ["norm", "rotary", "gate"]
    assert all(trial.failure.startswith("Triton does not load: ") for trial in trials)
    assert not list(tmp_path.iterdir())


def test_on_a_gpu_without_triton_a_planned_path_has_an_obstacle(monkeypatch):
    """As where a run goes on on another machine than it began on."""
    without_triton(monkeypatch)
    assert pointwise_path("cuda").obstacle(torch.nn.Linear(1, 1)).startswith("Triton does not load: ")
    assert pointwise_path("cpu").form == "blocks"


def test_a_run_on_a_cpu_does_not_touch_the_kernels_of_a_gpu(workplace, tmp_path, monkeypatch):
    without_triton(monkeypatch)
    train(config(workplace, tmp_path / "run", kernels=FUSED))
    assert recorded(tmp_path / "run")[0]["form"] == "blocks"
    assert "surefoot.kernels.triton_pointwise" not in sys.modules


def test_a_model_without_norms_and_turns_of_this_kind_is_told(workplace, tmp_path, monkeypatch):
    """A family with a row is planned plain; what a family without one has, only the model shows."""
    monkeypatch.setattr("surefoot.models.fast.pointwise.norm_form", lambda module: None)
    monkeypatch.setattr("surefoot.models.fast.pointwise._is_usual_turn", lambda function: False)
    with pytest.raises(EnvironmentFault, match="none of its norms or attention layers is of the usual form"):
        train(config(workplace, tmp_path / "run", kernels=FUSED))
