"""Which load-balancing loss a run adds: as config.json says, or as it is asked for, and where it cannot be had."""

from typing import Any

import pytest

from helpers.experts import moe_facts
from helpers.zoo_modern import MODERN
from surefoot.config.schema import RunConfig
from surefoot.models.facts import facts_of
from surefoot.planning.experts import plan_balance
from surefoot.planning.notes import Notes


def config(**changes: Any) -> RunConfig:
    plain = {"stage": "sft", "data": {"train": "d.json"}, "duration": "1 epoch", "output": "runs/a"}
    return RunConfig.model_validate(plain | changes)


@pytest.mark.parametrize(
    ("name", "changes", "asked", "value"),
    [
        ("mixtral", {}, "auto", 0.0),  # published config.json: no output_router_logits
        ("mixtral", {"output_router_logits": True}, "auto", 0.001),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.02}, "auto", 0.02),
        ("mixtral", {"output_router_logits": True}, 0, 0.0),
        ("mixtral", {"router_aux_loss_coef": 0.02}, "own", 0.02),
        ("olmoe", {}, 0.1, 0.1),
        ("deepseek_v3", {}, "auto", 0.0),
    ],
)
def test_the_coefficient(name, changes, asked, value, tmp_path):
    notes = Notes()
    request = config(model={"path": "x", "router_aux_loss_coef": asked})
    found = plan_balance(request, moe_facts(tmp_path, name, **changes), notes)
    assert found is not None
    assert found.value == value
    assert notes.faults == []


@pytest.mark.parametrize(("kind", "coefficient"), [("llama4_text", None), ("mixtral", 0.001)])
def test_a_key_without_a_loss_in_the_model_is_none(kind, coefficient, tmp_path):
    """Routers of Llama 4 do not tell which experts they choose."""
    folder = MODERN[kind](tmp_path, router_aux_loss_coef=0.001)
    assert facts_of(folder).balance == coefficient


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("deepseek_v3", {}),  # defines none
        ("mixtral", {"compile": "default"}),
        ("mixtral", {"stage": "reward"}),
    ],
)
def test_where_it_cannot_be_had_it_is_refused_or_left_out_with_a_caution(name, options, tmp_path):
    facts = moe_facts(tmp_path, name, output_router_logits=True)
    asked, auto = Notes(), Notes()
    request = config(model={"path": "x", "router_aux_loss_coef": 0.1}, **options)
    plan_balance(request, facts, asked)
    assert [(fault.code, fault.where) for fault in asked.faults] == [
        ("SF-CONFIG-CONFLICT", "model.router_aux_loss_coef")
    ]
    found = plan_balance(config(model="x", **options), facts, auto)
    assert found is not None
    assert found.value == 0.0
    assert auto.faults == []
    assert len(auto.cautions) == (name == "mixtral")
