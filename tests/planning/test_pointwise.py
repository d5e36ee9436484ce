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
GPU = dataclasses.replace(preset("h100"), memory=2**40, preset=False, triton=True)
TOKENS = 1000
WITHOUT_TRITON = dataclasses.replace(GPU, triton=False)


def trials(norm=(0.020, 0.005), turn=(0.010, 0.010), failure="", gate=None):
    gates = [PointwiseTrial("gate", *gate, "")] if gate else []
    return (PointwiseTrial("norm", *norm, failure), PointwiseTrial("rotary", *turn, ""), *gates)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tokenizer = read_tokenizer_facts(llama3_tokenizer(folder))

    def planned(seen=None, *, layer_norm=False, activation="silu", machine=HERE, **request):
        facts = model_facts(folder, LLAMA31_8B)
        model = dataclasses.replace(facts, layer_norm=layer_norm, activation=activation)
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
        ({"machine": WITHOUT_TRITON}, "need Triton, which is not installed (pip install triton)"),
        ({"machine": dataclasses.replace(GPU, kind="mps")}, "GPUs that Triton knows"),
        ({"machine": GPU, "compile": "default"}, "torch.compile"),
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


@pytest.mark.parametrize(
    ("seen", "value", "why"),
    [
        (trials(gate=(0.050, 0.010)), "fused", "norms, turns and gate, forward and backward here: plain 100, fused 30"),
        (trials(gate=(0.050, 0.075)), "plain", "little to gain"),  # 100 against 95
        (trials(failure="cannot run: Triton"), "plain", "norm: cannot run: Triton"),
    ],
)
def test_on_a_gpu_a_layers_gate_counts_as_well(planned, seen, value, why):
    choice = planned(seen, machine=GPU)
    assert (choice.value, choice.source) == (value, "measured")
    assert why in choice.reason
    assert ("by Triton" in choice.reason) == ("not right" not in choice.reason)


def test_of_a_gpu_elsewhere_the_plan_says_what_would_happen(planned):
    machine = dataclasses.replace(preset("h100"), memory=2**40)
    choice = planned(machine=machine)
    assert (choice.value, choice.source) == ("plain", "default")
    assert "norms, turns and gate are timed plain and fused by Triton; fused is taken where 1.2 x" in choice.reason
    assert planned(machine=machine, kernels={"pointwise": "fused"}).value == "fused"  # nobody knows of an obstacle


def test_gates_that_keep_less_are_forecast_on_a_gpu_alone(plan):
    """The 8B's gates are 14,336 wide, in bf16: what the activation makes of them is not kept in any layer."""

    def activations(machine, **facts):
        request = {
            "adapter": {"kind": "lora", "rank": 8},
            "precision": "bf16",
            "gradient_checkpointing": "off",
            "batch": {"size": 1, "micro": 1},
            "data": {"train": "rows.jsonl", "max_length": TOKENS},
        }
        plain, fused = (
            plan(machine=machine, kernels={"pointwise": way}, **request, **facts).memory.activations
            for way in ("plain", "fused")
        )
        return plain - fused

    tanh = "gelu_pytorch_tanh"
    of_gates = activations(GPU) - activations(GPU, activation=tanh)
    layers = 32 + 0.5  # what one layer needs to go backward is half of what it keeps
    assert of_gates == pytest.approx(layers * TOKENS * 2 * 14_336, rel=1e-6)
    assert activations(HERE) == activations(HERE, activation=tanh)


def test_what_was_measured_is_kept_in_the_plan_and_plans_of_before_are_plain():
    seen = Measurements(pointwise=trials())
    assert measurements_from_json(measurements_to_json(seen)) == seen
    assert measurements_from_json({}).pointwise == ()
    assert KernelsPlan().pointwise.value == "plain"
