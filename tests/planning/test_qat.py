"""What a plan makes of precision.qat, and what it refuses before anything is loaded."""

import dataclasses

import pytest

from helpers.faults import gives
from helpers.model_layouts import LLAMA31_8B, llama3_tokenizer, model_facts, run_config
from surefoot.config.contradictions import contradictions
from surefoot.families import find
from surefoot.families.tokenizer_facts import read_tokenizer_facts
from surefoot.planning.plan import plan_from_json, plan_to_json
from surefoot.planning.resolve import resolve
from surefoot.system.errors import InputError
from surefoot.system.hardware import preset

LORA = {"kind": "lora", "rank": 4}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = model_facts(folder, LLAMA31_8B), read_tokenizer_facts(llama3_tokenizer(folder))
    roomy = dataclasses.replace(preset("h100"), memory=2**40)

    def plan(qat, facts=None, **request):
        facts = dataclasses.replace(model, **(facts or {}))
        config = run_config(precision={"compute": "bf16"} | qat, **request)
        return resolve(config, facts, tokenizer, roomy, measurements=None, environment={})

    return plan


def refused(plan, *args, **request):
    with pytest.raises(InputError) as caught:
        plan(*args, **request)
    return [fault.where for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("qat", "group"),
    [({"qat": "int4"}, 32), ({"qat": "int8-int4", "qat_group_size": 256}, 256), ({"qat": "int8"}, None)],
)
def test_the_plan_says_what_is_rounded(plan, qat, group):
    found = plan(qat, adapter=None)
    assert (found.precision.qat.value, found.precision.qat_group) == (qat["qat"], group)
    assert found.precision.qat.source == "user"
    assert [gives(found.precision.qat.reason, one) for one in ("6,979,321,856", 224)] == [True, True]  # weights, layers
    assert plan_from_json(plan_to_json(found)) == found
    assert found.memory.total > plan({}, adapter=None).memory.total


def test_without_it_nothing_is_rounded_and_older_plans_read(plan):
    found = plan({}, adapter=None)
    assert (found.precision.qat.value, found.precision.qat_group) == ("off", None)
    saved = plan_to_json(found)
    del saved["precision"]["qat"], saved["precision"]["qat_group"]
    older = plan_from_json(saved).precision
    assert (older.qat.value, older.qat_group) == ("off", None)


def test_the_adapters_own_kernels_would_pass_the_rounding_by(plan):
    kernels = plan({"qat": "int4"}, adapter=LORA).kernels
    assert kernels.adapter.value == "plain"
    assert plan({}, adapter=LORA).kernels.adapter.value == "fast"
    assert refused(plan, {"qat": "int4"}, adapter=LORA, kernels={"adapter": "fast"}) == ["kernels.adapter"]


@pytest.mark.parametrize(
    ("request_", "facts", "where"),
    [
        ({"adapter": None}, {"family": find("gpt2"), "model_type": "gpt2"}, "precision.qat"),
        ({"adapter": None}, {"active": 2}, "precision.qat"),
        ({"adapter": LORA | {"kind": "dora"}}, {}, "precision.qat"),
        ({"adapter": LORA | {"modules_to_save": ["up_proj"]}}, {}, "adapter.modules_to_save"),
        ({"adapter": None, "parallel": {"engine": "fsdp2"}}, {}, "precision.qat"),
    ],
)
def test_what_was_not_tried_is_refused(plan, request_, facts, where):
    assert where in refused(plan, {"qat": "int4"}, facts, **request_)


def test_groups_have_to_divide_the_inputs(plan):
    assert refused(plan, {"qat": "int4", "qat_group_size": 24}, adapter=None) == ["precision.qat_group_size"]


@pytest.mark.parametrize(
    ("sections", "keys"),
    [
        ({"precision": {"qat_group_size": 64}}, ["precision.qat_group_size"]),
        ({"precision": {"qat": "int8", "qat_group_size": 64}}, ["precision.qat_group_size"]),
        ({"precision": {"qat": "int4", "base": "nf4"}}, ["precision.qat"]),
        ({"precision": {"qat": "int4"}, "compile": "default"}, ["precision.qat"]),
        ({"precision": {"qat": "int4"}, "adapter": LORA | {"publish": "merged"}}, ["adapter.publish"]),
        ({"precision": {"qat": "int4"}, "stage": "kto"}, ["precision.qat"]),
        ({"precision": {"qat": "int4", "qat_group_size": 64}}, []),
    ],
)
def test_keys_that_exclude_each_other(sections, keys):
    assert [problem.key for problem in contradictions(run_config(**sections))] == keys
