"""Whether norms and turns are fused: what was measured decides, and what stands in the way is said."""

import dataclasses

import pytest

from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning.measurements import Measurements, PointwiseTrial, measurements_from_json, measurements_to_json
from surefoot.planning.plan import KernelsPlan
from surefoot.planning.resolve import resolve
from surefoot.system.errors import InputError
from surefoot.system.hardware import Hardware, preset

HERE = Hardware("this CPU", "cpu", 2**40, None, False, True, False, 2, preset=False)
GPU = dataclasses.replace(preset("h100"), memory=2**40, preset=False)


def trials(norm=(0.020, 0.005), turn=(0.010, 0.010), failure=""):
    return (PointwiseTrial("norm", *norm, failure), PointwiseTrial("rotary", *turn, ""))


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = read_tokenizer_facts(llama3_tokenizer(folder))

    def planned(seen=None, *, layer_norm=False, machine=HERE, **request):
        facts = model_facts(folder, LLAMA31_8B)
        model = dataclasses.replace(facts, layer_norm=layer_norm)
        measured = None if seen is None else Measurements(pointwise=seen)
        return resolve(run_config(**request), model, tokenizer, machine, measurements=measured, environment={})

    return planned


@pytest.fixture(scope="module")
def planned(plan):
    return lambda *given, **request: plan(*given, **request).kernels.pointwise


def test_what_is_clearly_faster_is_taken(planned):
    """A layer has two norms and one turn: 50 ms against 20."""
    choice = planned(trials())
    assert (choice.value, choice.source) == ("fused", "measured")
    assert "plain 50, fused 20" in choice.reason


@pytest.mark.parametrize(
    ("seen", "value", "why"),
    [
        (trials(norm=(0.020, 0.016)), "plain", "little to gain"),  # 50 against 42
        (trials(norm=(0.020, 0.015)), "fused", "plain 50, fused 40"),
        (trials(failure="the output is off by 0.1"), "plain", "norm: the output is off by 0.1"),
        (None, "plain", "nothing was measured"),
    ],
)
def test_auto(planned, seen, value, why):
    choice = planned(seen)
    assert choice.value == value
    assert why in choice.reason


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ({"compile": "default"}, "torch.compile"),
        ({"parallel": {"engine": "fsdp2"}}, "fsdp2 hands each module its weights"),
        ({"machine": GPU}, "run on a CPU"),
        ({"machine": dataclasses.replace(GPU, kind="mps")}, "run on a CPU"),
        ({"machine": GPU, "parallel": {"engine": "fsdp2"}}, "fsdp2 hands each module its weights"),
        ({"layer_norm": True}, "LayerNorm"),
    ],
    ids=str,
)
def test_where_it_cannot_run_auto_is_plain_and_a_request_is_refused(planned, request_, why):
    choice = planned(trials(), **request_)
    assert choice.value == "plain"
    assert why in choice.reason
    with pytest.raises(InputError) as caught:
        planned(trials(), kernels={"pointwise": "fused"}, **request_)
    assert "kernels.pointwise" in [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize("asked", ["plain", "fused"])
@pytest.mark.parametrize("seen", [None, trials(norm=(0.01, 0.02))])
def test_a_request_is_honoured(planned, asked, seen):
    choice = planned(seen, kernels={"pointwise": asked})
    assert (choice.value, choice.source) == (asked, "user")


def test_of_a_machine_elsewhere_the_plan_says_what_would_happen(planned):
    machine = dataclasses.replace(preset("cpu"), memory=2**40)
    choice = planned(machine=machine)
    assert (choice.value, choice.source) == ("plain", "default")
    assert "norms and rotations are timed plain and fused; fused is taken where 1.2 x" in choice.reason
    assert planned(machine=machine, kernels={"pointwise": "fused"}).value == "fused"  # nobody knows of an obstacle


def test_what_was_measured_is_kept_in_the_plan_and_plans_of_before_are_plain():
    """Plans of before may have timed gates on a GPU, too."""
    seen = Measurements(pointwise=(*trials(), PointwiseTrial("gate", 0.05, 0.01, "")))
    assert measurements_from_json(measurements_to_json(seen)) == seen
    assert measurements_from_json({}).pointwise == ()
    assert KernelsPlan().pointwise.value == "plain"
