"""What a search begins with is the plan's own choice, and what it varies reaches every form that a plan can take."""

from __future__ import annotations

import pytest

from helpers.model_layouts import LLAMA2_7B, llama2_tokenizer, model_facts
from surefoot.commands.tune.space import given_keys, make_space
from surefoot.commands.tune.trials import with_settings
from surefoot.config.load import check_config
from surefoot.planning.measurements import AttentionTrial, LengthFacts, Measurements, measurements_to_json
from surefoot.planning.plan import diff_plans
from surefoot.runs.plan import make_plan
from surefoot.system.hardware import preset

LENGTHS = LengthFacts(longest=300, typical=200, mean=100.0, mix=(50, 100, 200), padding=0.3)
PACKED = (AttentionTrial("matmul", 0.01, ""), AttentionTrial("sdpa", 0.03, ""), AttentionTrial("padded", 0.02, ""))
PADDED = (AttentionTrial("matmul", 0.09, ""), AttentionTrial("sdpa", 0.08, ""), AttentionTrial("padded", 0.01, ""))


@pytest.fixture
def given(tmp_path):
    model_facts(tmp_path / "base", LLAMA2_7B | {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512})
    llama2_tokenizer(tmp_path / "base")
    (tmp_path / "rows.json").write_text('[{"text": "anything"}]')
    return {
        "stage": "sft",
        "model": {"path": str(tmp_path / "base")},
        "adapter": {"kind": "lora", "rank": 4},
        "data": {"train": str(tmp_path / "rows.json"), "max_length": 512},
        "batch": {"size": 8},
        "duration": "3 steps",
        "output": str(tmp_path / "run"),
    }


def plan_of(config, documents):
    seen = measurements_to_json(Measurements(documents=documents))
    return make_plan(check_config(config), hardware=preset("cpu"), measurements=seen, lengths=LENGTHS)


def space_of(given, documents):
    plan = plan_of(given, documents)
    return plan, make_space(check_config(given), set(given_keys(given)), plan, preset("cpu"), Measurements())


@pytest.mark.parametrize(("documents", "form"), [(PACKED, "matmul"), (PADDED, "plain")])
def test_the_start_plans_what_the_config_plans(given, documents, form):
    plan, space = space_of(given, documents)
    assert plan.kernels.documents.value == form
    assert not diff_plans(plan, plan_of(with_settings(given, space.start), documents))


def test_twin_a_start_that_names_sdpa_plans_another_form_of_packed_rows(given):
    plan, space = space_of(given, PACKED)
    named = plan_of(with_settings(given, {**space.start, "attention.implementation": "sdpa"}), PACKED)
    assert {one.path: one.new for one in diff_plans(plan, named)}["kernels.documents.value"] == "sdpa"


def test_both_forms_are_among_the_values(given):
    _, space = space_of(given, PACKED)
    [values] = [axis.values for axis in space.axes if axis.key == "attention.implementation"]
    forms = {
        plan_of(
            with_settings(given, {**space.start, "attention.implementation": value}), PACKED
        ).kernels.documents.value
        for value in values
        if value != "eager"
    }
    assert forms == {"matmul", "sdpa"}
