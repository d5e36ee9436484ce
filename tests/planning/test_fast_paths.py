"""Which of surefoot's own kernels a run uses, and what is said where it does not."""

import dataclasses

import pytest

from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning.measurements import Measurements, PointwiseTrial, measurements_from_json, measurements_to_json
from surefoot.planning.plan import KernelsPlan
from surefoot.planning.resolve import resolve
from surefoot.system.errors import InputError
from surefoot.system.hardware import Hardware, preset

LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def planned_kernels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(llama3_tokenizer(folder))
    h100 = dataclasses.replace(preset("h100"), memory=2**40)

    def planned(machine=h100, seen=None, *, layer_norm=False, **request):
        facts = dataclasses.replace(model, layer_norm=layer_norm)
        return resolve(run_config(**request), facts, tokenizer, machine, measurements=seen, environment={}).kernels

    return planned


@pytest.fixture
def planned(planned_kernels):
    def planned(asked="auto", **request):
        return planned_kernels(**({"adapter": LORA, "kernels": {"adapter": asked}} | request)).adapter

    return planned


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_auto_is_fast_where_weights_are_whole(planned, kind):
    choice = planned(adapter=LORA | {"kind": kind})
    assert (choice.value, choice.source) == ("fast", "default")


def test_where_it_cannot_run_auto_is_plain_and_a_request_is_refused(planned):
    for request_, why in [
        ({"precision": {"base": "nf4"}}, "nf4"),
        ({"precision": {"base": "int8"}}, "int8"),
        ({"parallel": {"engine": "fsdp2"}}, "fsdp2 hands each module its weights"),
        ({"parallel": {"engine": "deepspeed"}}, "deepspeed hands each module its weights"),
        ({"compile": "default"}, "torch.compile"),
        ({"adapter": None}, "no adapter"),
    ]:
        choice = planned(**request_)
        assert choice.value == "plain"
        assert why in choice.reason
        with pytest.raises(InputError) as caught:
            planned("fast", **request_)
        assert "kernels.adapter" in [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize("asked", ["plain", "fast"])
def test_a_request_is_honoured(planned, asked):
    choice = planned(asked)
    assert (choice.value, choice.source) == (asked, "user")


@pytest.fixture
def last_block(planned_kernels):
    def last_block(asked="auto", **request):
        return planned_kernels(kernels={"last_block": asked}, **request).last_block

    return last_block


@pytest.mark.parametrize(
    "request_", [{}, {"adapter": LORA}, {"stage": "reward"}, {"precision": {"base": "nf4"}, "adapter": LORA}], ids=str
)
def test_rows_that_nobody_reads_are_left_out_by_default(last_block, request_):
    choice = last_block(**request_)
    assert (choice.value, choice.source) == ("pruned", "default")
    assert last_block("plain", **request_).source == "user"


def test_where_other_rows_matter_the_last_block_is_plain(last_block):
    for request_, why in [
        ({"stage": "pretrain"}, "all positions"),
        ({"parallel": {"engine": "fsdp2"}}, "fsdp2 has hooks"),
        ({"parallel": {"engine": "deepspeed"}}, "deepspeed has hooks"),
        ({"compile": "default"}, "torch.compile"),
        ({"adapter": LORA | {"dropout": 0.1}}, "dropout"),
        ({"model": {"path": "base", "dropout": 0.1}}, "dropout"),
        ({"bos": {"scale": 0.5}}, "bos.scale"),
    ]:
        choice = last_block(**request_)
        assert choice.value == "plain"
        assert why in choice.reason
        with pytest.raises(InputError) as caught:
            last_block("pruned", **request_)
        assert "kernels.last_block" in [fault.where for fault in caught.value.faults]


HERE = Hardware("this CPU", "cpu", 2**40, None, False, True, False, 2, preset=False)
GPU = dataclasses.replace(preset("h100"), memory=2**40, preset=False)


def trials(norm=(0.020, 0.005), turn=(0.010, 0.010), failure=""):
    return (PointwiseTrial("norm", *norm, failure), PointwiseTrial("rotary", *turn, ""))


@pytest.fixture(scope="module")
def pointwise(planned_kernels):
    def pointwise(seen=None, *, machine=HERE, **request):
        measured = None if seen is None else Measurements(pointwise=seen)
        return planned_kernels(machine, measured, **request).pointwise

    return pointwise


def test_what_is_clearly_faster_is_taken(pointwise):
    """A layer has two norms and one turn: 50 ms against 20."""
    choice = pointwise(trials())
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
def test_norms_and_rotations_follow_what_was_measured(pointwise, seen, value, why):
    choice = pointwise(seen)
    assert choice.value == value
    assert why in choice.reason


def test_where_norms_cannot_run_auto_is_plain_and_a_request_is_refused(pointwise):
    for request_, why in [
        ({"compile": "default"}, "torch.compile"),
        ({"parallel": {"engine": "fsdp2"}}, "fsdp2 hands each module its weights"),
        ({"machine": GPU}, "run on a CPU"),
        ({"machine": dataclasses.replace(GPU, kind="mps")}, "run on a CPU"),
        ({"machine": GPU, "parallel": {"engine": "fsdp2"}}, "fsdp2 hands each module its weights"),
        ({"layer_norm": True}, "LayerNorm"),
    ]:
        choice = pointwise(trials(), **request_)
        assert choice.value == "plain"
        assert why in choice.reason
        with pytest.raises(InputError) as caught:
            pointwise(trials(), kernels={"pointwise": "fused"}, **request_)
        assert "kernels.pointwise" in [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize("asked", ["plain", "fused"])
@pytest.mark.parametrize("seen", [None, trials(norm=(0.01, 0.02))])
def test_a_request_for_norms_is_honoured(pointwise, asked, seen):
    choice = pointwise(seen, kernels={"pointwise": asked})
    assert (choice.value, choice.source) == (asked, "user")


def test_of_a_machine_elsewhere_the_plan_says_what_would_happen(pointwise):
    machine = dataclasses.replace(preset("cpu"), memory=2**40)
    choice = pointwise(machine=machine)
    assert (choice.value, choice.source) == ("plain", "default")
    assert "norms and rotations are timed plain and fused; fused is taken where 1.2 x" in choice.reason
    assert pointwise(machine=machine, kernels={"pointwise": "fused"}).value == "fused"  # nobody knows of an obstacle


def test_what_was_measured_is_kept_in_the_plan_and_plans_of_before_are_plain():
    """Plans of before may have timed gates on a GPU, too."""
    seen = Measurements(pointwise=(*trials(), PointwiseTrial("gate", 0.05, 0.01, "")))
    assert measurements_from_json(measurements_to_json(seen)) == seen
    assert measurements_from_json({}).pointwise == ()
    assert KernelsPlan().pointwise.value == "plain"
