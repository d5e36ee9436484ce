"""A plan that went to disk and came back is the same plan."""

import dataclasses
import json

import pytest

from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning.measurements import AttentionTrial, Measurements
from surefoot.planning.plan import diff_plans, plan_from_json, plan_to_json
from surefoot.planning.resolve import resolve
from surefoot.system.errors import InputError
from surefoot.system.hardware import preset

SEEN = Measurements({"fp32": 1e11, "bf16": 3e11}, (AttentionTrial("flash", 0.01, "", {"output": 1e-3}),), "bf16", 512)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(llama3_tokenizer(folder))

    def make(machine="h100", **request):
        found = dataclasses.replace(preset(machine), memory=2**40)
        environment = {"SDPA_BACKEND": "flash"}
        return resolve(run_config(**request), model, tokenizer, found, measurements=SEEN, environment=environment)

    return make


@pytest.mark.parametrize("request_", [{}, {"adapter": None}, {"precision": "fp16"}, {"attention": "eager"}])
def test_there_and_back(make, request_):
    plan = make(**request_)
    text = json.dumps(plan_to_json(plan), allow_nan=False)
    back = plan_from_json(json.loads(text))
    assert back == plan
    assert json.dumps(plan_to_json(back)) == text


def test_a_lost_field_would_be_noticed(make):
    data = plan_to_json(make())
    data["batch"]["accumulation"] += 1
    assert plan_from_json(data) != make()


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("precision", "compute", "value"), "fp8", "plan: precision.compute.value"),
        (("batch", "micro", "value"), "many", "plan: batch.micro.value"),
        (("tokenizer", "max_length", "value"), "auto", "plan: tokenizer.max_length.value"),
        (("memory",), None, "plan: memory"),
    ],
)
def test_an_edited_plan_is_refused_with_the_place(make, path, value, where):
    data = plan_to_json(make())
    *groups, last = path
    inner = data
    for group in groups:
        inner = inner[group]
    inner[last] = value
    with pytest.raises(InputError) as caught:
        plan_from_json(data)
    assert where in [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize("data", [None, 3, [], "plan"])
def test_what_is_no_plan_at_all_is_one_fault(data):
    with pytest.raises(InputError) as caught:
        plan_from_json(data)
    assert [fault.where for fault in caught.value.faults] == ["plan"]


def test_the_difference_names_values_only(make):
    one, two = make(), make(precision="fp16")
    found = {difference.path: (difference.old, difference.new) for difference in diff_plans(one, two)}
    assert found["precision.compute.value"] == ("bf16", "fp16")
    assert found["precision.scaler.value"] == (False, True)
    assert not [path for path in found if path.endswith(("reason", "source"))]
    assert not diff_plans(one, make())


def test_an_adapter_that_only_one_plan_has(make):
    paths = [difference.path for difference in diff_plans(make(), make(adapter=None))]
    assert "adapter" in paths
