"""Runs with surefoot's own norms and turns: used and recorded, exact on resume, taken out where they differ."""

import pytest
from transformers import AutoModelForCausalLM

from helpers.faults import lines_giving, raises_fault
from helpers.growing_records import write_sky
from helpers.path_runs import fast_paths, forget, losses, path_config, saved_plan, start, weights
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from surefoot.kernels import pointwise
from surefoot.models.fast import pointwise as module
from surefoot.models.fast.pointwise import pointwise_path
from surefoot.planning.measurements import PointwiseTrial
from surefoot.planning.precision import NARROW
from surefoot.runs import measured

FUSED = {"pointwise": "fused"}
FASTER = (PointwiseTrial("norm", 0.02, 0.01, ""), PointwiseTrial("rotary", 0.02, 0.01, ""))


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("work")
    write_sky(folder, 8)
    tiny_llama(folder / "base")
    tiny_llama(folder / "wide", hidden=NARROW)
    return folder


def recorded(folder):
    """What environment.json says of the path, and what plan.json does."""
    return fast_paths(folder).get("pointwise"), saved_plan(folder).kernels.pointwise


WAYS = [
    {},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"adapter": None},
    {"data": {"packing": "on"}, "bos": {"scale": 0.5}},
    {"gradient_checkpointing": "on", "adapter": {"kind": "dora", "rank": 4}},
]


@pytest.mark.parametrize("way", representatives(WAYS, {"precision": "bf16"}, WAYS[4]), ids=str)
def test_a_run_that_asks_for_it_has_it(workplace, tmp_path, way):
    start(path_config(workplace, tmp_path / "run", kernels=FUSED, **way))
    found, choice = recorded(tmp_path / "run")
    assert found["used"]
    assert 0 < found["differs"]["gradient"] < found["limits"]["gradient"]
    assert choice.value == "fused"
    start(path_config(workplace, tmp_path / "plain", kernels={"pointwise": "plain"}, **way))
    assert recorded(tmp_path / "plain") == (None, recorded(tmp_path / "plain")[1])
    rough = way.get("precision") in ("bf16", "fp16")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-2 if rough else 1e-4)


def test_an_interrupted_run_goes_on_bit_for_bit(workplace, tmp_path):
    wanted = path_config(workplace, tmp_path / "run", kernels=FUSED)
    start(wanted)
    uninterrupted = weights(tmp_path / "run")
    forget(tmp_path / "run", [2])
    start(wanted, "resume")
    assert recorded(tmp_path / "run")[0]["used"]
    assert weights(tmp_path / "run") == uninterrupted
    start(path_config(workplace, tmp_path / "plain", kernels={"pointwise": "plain"}))
    assert weights(tmp_path / "plain") != uninterrupted  # twin: the plain path has other last bits


def break_norm(monkeypatch):
    right = pointwise.norm_backward

    def wrong(*given, **how):
        dx, dw = right(*given, **how)
        return dx * 2, dw

    monkeypatch.setattr(pointwise, "norm_backward", wrong)


def test_one_that_was_asked_for_and_differs_ends_the_run(workplace, tmp_path, monkeypatch):
    break_norm(monkeypatch)
    with raises_fault("SF-FAST-PATH", "kernels.pointwise"):
        start(path_config(workplace, tmp_path / "run", kernels=FUSED))
    assert not (tmp_path / "run").exists()


def test_one_that_was_measured_and_differs_is_taken_out(workplace, tmp_path, monkeypatch):
    monkeypatch.setattr(measured, "measured_pointwise", lambda *asked: FASTER)
    fused = path_config(workplace, tmp_path / "fused", base="wide", precision="fp32")
    start(fused)
    assert recorded(tmp_path / "fused")[1].value == "fused"
    break_norm(monkeypatch)
    screen = start(path_config(workplace, tmp_path / "run", base="wide", precision="fp32"))
    assert lines_giving(screen, "caution:", "kernels.pointwise:", "fused")
    found, choice = recorded(tmp_path / "run")
    assert (found["used"], choice.value, choice.source) == (False, "plain", "measured")
    start(path_config(workplace, tmp_path / "plain", base="wide", precision="fp32", kernels={"pointwise": "plain"}))
    assert weights(tmp_path / "run") == weights(tmp_path / "plain") != weights(tmp_path / "fused")


def test_a_run_that_began_with_the_kernels_of_a_gpu_cannot_go_on(workplace, tmp_path, monkeypatch):
    """A saved plan that has liger-kernel's norms is refused where that is not installed, never continued by others."""
    assert pointwise_path("cpu").obstacle(tiny_model(workplace)) == ""
    assert pointwise_path("cuda").obstacle(tiny_model(workplace))
    wanted = path_config(workplace, tmp_path / "run", kernels=FUSED)
    start(wanted)
    assert recorded(tmp_path / "run")[0]["form"] == "blocks"
    forget(tmp_path / "run", [2])
    monkeypatch.setattr(module, "pointwise_path", lambda kind: pointwise_path("cuda"))
    with raises_fault("SF-FAST-PATH", "kernels.pointwise"):
        start(wanted, "resume")


def tiny_model(workplace):
    return AutoModelForCausalLM.from_pretrained(workplace / "base")


def test_a_model_without_norms_and_turns_of_this_kind_is_told(workplace, tmp_path, monkeypatch):
    """A family with a row is planned plain; what a family without one has, only the model shows."""
    monkeypatch.setattr("surefoot.models.fast.pointwise.norm_form", lambda module: None)
    monkeypatch.setattr("surefoot.models.fast.pointwise._is_usual_rotary", lambda function: False)
    with raises_fault("SF-FAST-PATH", "kernels.pointwise"):
        start(path_config(workplace, tmp_path / "run", kernels=FUSED))
