"""What trains, kind by kind of layers: against the model that transformers builds and the adapter that PEFT puts in."""

import pytest

from helpers.experts import MOE, moe_facts, moe_model
from helpers.faults import gives, raises_fault
from surefoot.config.sections import AdapterShape
from surefoot.models.adapter_targets import adapted_modules, adapted_parameters
from surefoot.models.adapters import add_adapter
from surefoot.planning.adapter import plan_adapter
from surefoot.planning.coverage import coverage
from surefoot.planning.notes import Notes

# What the names of parameters in transformers' models say, most telling first.
WORDS = (
    ("norm", "norms"),
    ("embed_tokens", "embeddings"),
    ("lm_head", "head"),
    ("attn", "attention"),
    (".experts.", "experts"),
    ("shared_expert_gate", "router"),
    (".gate.", "router"),
    (".router.", "router"),
    ("proj", "MLP"),
)


def kind_by_name(parameter: str) -> str:
    return next(kind for word, kind in WORDS if word in parameter.replace("base_layer.", ""))


def shape(kind: str = "lora", **options) -> AdapterShape:
    return AdapterShape(kind=kind, rank=4, **options)


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("router", [False, True])
def test_counts_are_those_of_the_model_with_its_adapter(name, router, tmp_path):
    facts, notes = moe_facts(tmp_path, name), Notes()
    plan = plan_adapter(shape(router=router), facts, 0, notes)
    assert notes.faults == []
    model = add_adapter(moe_model(name), plan, seed=1, base="base")
    assert set(adapted_modules(model)) == set(plan.targets.value)
    assert set(adapted_parameters(model)) == set(plan.parameters)
    weights: dict[str, int] = {}
    trained: dict[str, int] = {}
    for parameter, values in model.named_parameters():
        counts = trained if values.requires_grad else weights
        counts[kind_by_name(parameter)] = counts.get(kind_by_name(parameter), 0) + values.numel()
    rows = coverage(facts, plan)
    assert {row.kind: row.weights for row in rows} == weights
    assert {row.kind: row.trained for row in rows if row.trained} == trained
    assert plan.trainable == sum(trained.values())
    reached = {row.kind: row.reached for row in rows}
    assert reached["experts"] == sum(
        p.numel() for n, p in moe_model(name).named_parameters() if p.ndim == 3 and "experts" in n
    )
    assert (reached["router"] > 0) == router
    assert reached["embeddings"] == reached["head"] == reached["norms"] == 0


def test_in_full_fine_tuning_all_weights_train(tmp_path):
    facts = moe_facts(tmp_path, "mixtral")
    rows = coverage(facts, None)
    assert all(row.weights == row.reached == row.trained for row in rows)
    assert (
        sum(row.weights for row in rows)
        == facts.parameters
        == sum(p.numel() for p in moe_model("mixtral").parameters())
    )


def test_a_tied_head_has_no_weights_of_its_own(tmp_path):
    facts = moe_facts(tmp_path, "granitemoe", tie_word_embeddings=True)
    assert "head" not in {row.kind for row in coverage(facts, None)}
    assert sum(row.weights for row in coverage(facts, None)) == facts.parameters


def faults(facts, request: AdapterShape) -> list[tuple[str, str]]:
    notes = Notes()
    plan_adapter(request, facts, 0, notes)
    return [(fault.code, fault.where) for fault in notes.faults]


SHALLOW = [("SF-ADAPTER-SHALLOW", "adapter.targets")]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"kind": "dora"}, SHALLOW),
        ({"dropout": 0.1}, SHALLOW),
        ({"experts": False}, []),  # asked for
        ({"kind": "dora", "experts": False}, []),
        ({"targets": ["q_proj"]}, []),
        ({"kind": "dora", "experts": True}, [("SF-ADAPTER-DORA", "adapter.targets")]),
        ({"kind": "dora", "targets": ["q_proj", "experts.down_proj"]}, [("SF-ADAPTER-DORA", "adapter.targets")]),
        ({"kind": "dora", "experts": False, "router": True}, [("SF-ADAPTER-DORA", "adapter.router")]),
        ({"targets": ["experts.w1"]}, [("SF-ADAPTER-TARGETS", "adapter.targets")]),
    ],
)
def test_what_would_train_shallowly_unasked_is_refused(options, expected, tmp_path):
    assert faults(moe_facts(tmp_path, "mixtral"), shape(**options)) == expected


SHARED = ["gate_proj", "up_proj", "down_proj"]  # of an expert that sees every token; PEFT knows experts by these names


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "dora"}, [("SF-ADAPTER-DORA", "adapter.kind")]),
        ({"dropout": 0.1}, [("SF-ADAPTER-TARGETS", "adapter.dropout")]),
        ({}, []),
    ],
)
@pytest.mark.parametrize("name", ["qwen3_next", "deepseek_v3", "qwen2_moe"])
def test_layers_that_peft_adapts_as_parameters_are_refused_in_the_plan_as_at_set_up(name, options, expected, tmp_path):
    facts, notes = moe_facts(tmp_path, name), Notes()
    plan = plan_adapter(shape(experts=False, **options), facts, 0, notes)
    found = [(fault.code, fault.where) for fault in notes.faults]
    assert found == ([] if name == "qwen2_moe" else expected)  # PEFT takes its names as they are
    if found:
        assert all(gives(notes.faults[0].what, layer) for layer in SHARED)
        assert not any(gives(notes.faults[0].fix, layer) for layer in SHARED)
        with raises_fault(*found[0]):
            add_adapter(moe_model(name), plan, seed=1, base="base")
        left = sorted({target.rpartition(".")[2] for target in plan.targets.value} - set(SHARED))
        assert faults(facts, shape(experts=False, targets=left, **options)) == []  # what the message says to write
        plan = plan_adapter(shape(experts=False, targets=left, **options), facts, 0, Notes())
    add_adapter(moe_model(name), plan, seed=1, base="base")


def test_the_refusal_has_both_numbers_and_a_dense_model_never_meets_it(tmp_path):
    facts, notes = moe_facts(tmp_path, "mixtral"), Notes()
    plan_adapter(shape("dora"), facts, 0, notes)
    attention = sum(p.numel() for n, p in moe_model("mixtral").named_parameters() if "self_attn" in n)
    layers = sum(p.numel() for n, p in moe_model("mixtral").named_parameters() if ".layers." in n and "norm" not in n)
    assert f"{attention:,}" in notes.faults[0].what
    assert f"{layers:,}" in notes.faults[0].what


@pytest.mark.parametrize(
    ("options", "parameters"),
    [
        ({"targets": ["experts.down_proj"]}, ["experts.down_proj"]),
        ({"targets": ["experts"]}, ["experts.down_proj", "experts.gate_up_proj"]),
        ({"targets": ["q_proj"], "experts": True}, ["experts.down_proj", "experts.gate_up_proj"]),
        ({"targets": ["q_proj"], "router": True}, ["gate.weight"]),
        ({"targets": ["gate"]}, ["gate.weight"]),
        ({"targets": ["model.layers."]}, ["experts.down_proj", "experts.gate_up_proj"]),
        ({"targets": ["model.layers."], "experts": False}, []),
        ({"targets": ["q_proj"]}, []),
    ],
)
def test_names_reach_parameters_as_they_reach_layers(options, parameters, tmp_path):
    plan = plan_adapter(shape(**options), moe_facts(tmp_path, "mixtral"), 0, Notes())
    assert sorted({".".join(name.split(".")[-2:]) for name in plan.parameters}) == parameters
    model = add_adapter(moe_model("mixtral"), plan, seed=1, base="base")
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == plan.trainable


@pytest.mark.parametrize(("name", "meant"), [("experts.down_porj", "experts.down_proj"), ("q_porj", "q_proj")])
def test_a_target_that_does_not_exist_is_answered_with_a_name_of_experts_too(name, meant, tmp_path):
    notes = Notes()
    plan_adapter(shape(targets=[name]), moe_facts(tmp_path, "qwen3_moe"), 0, notes)
    (fault,) = notes.faults
    assert gives(fault.fix, meant)
