"""Experts' adapters compared with PEFT's own forward while weights are whole, as before fsdp2 and ZeRO 3."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from helpers.experts import MOE, expert_parameters, moe_model
from helpers.plans import adapter_plan, linear_names
from surefoot.models.adapters import add_adapter
from surefoot.models.fast import experts as fast
from surefoot.models.fast.experts import experts_path
from surefoot.models.peft import PeftModel
from surefoot.runs.parity.experts import experts_record

RIGHT = 1e-5  # fp32 in another order; the limit is a hundred times as much


def adapted(name: str, dtype: torch.dtype = torch.float32) -> PeftModel:
    model = moe_model(name, dtype)
    plan = dataclasses.replace(adapter_plan(linear_names(model)), parameters=expert_parameters(model))
    return add_adapter(model, plan, seed=1, base="base")


@pytest.mark.parametrize("name", MOE)
def test_it_is_right_for_every_family_and_leaves_the_model_as_it_was(name):
    model = adapted(name, torch.bfloat16)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert experts_path().obstacle(model) == ""
    record = experts_record(model, resumed=False)
    assert (record["used"], record["outside"]) == (True, False)
    assert 0 < record["fp32"]["differs"] <= RIGHT
    after = model.state_dict()
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    assert [module for module in model.modules() if "forward" in vars(module)] == []


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("change", ["half", "order", "bias", "nan"])
def test_twin_a_wrong_formula_is_left_out_and_stays_where_the_run_started_with_it(monkeypatch, change, resumed):
    model, proper = adapted("gpt_oss"), fast._matrices

    def wrong(experts, name, pair):
        found = proper(experts, name, pair)
        if change == "half":
            return dataclasses.replace(found, scale=found.scale / 2)
        if change == "nan":
            return dataclasses.replace(found, scale=float("nan"))
        if change == "bias":
            return dataclasses.replace(found, bias=None)
        b = found.b
        assert b is not None
        return dataclasses.replace(found, b=b.view(len(b), experts.num_experts, -1).transpose(1, 2).reshape(b.shape))

    with torch.no_grad():
        for key, tensor in model.named_parameters():
            if key.endswith("_bias"):
                tensor.normal_()
    monkeypatch.setattr(fast, "_matrices", wrong)
    record = experts_record(model, resumed=resumed)
    assert (record["used"], record["outside"]) == (resumed, True)


def test_parameters_of_a_module_of_unknown_layout_are_an_obstacle(monkeypatch):
    model = adapted("mixtral")
    monkeypatch.setattr(fast, "_LAYOUT", ("no_such_attribute",))
    record = experts_record(model, resumed=False)
    assert not record["used"]
    assert "MixtralExperts" in record["obstacle"]


def test_a_linear_layer_that_peft_adapts_as_a_parameter_keeps_changes_that_16_bits_would_round():
    """B A a thousandth of W, which bf16 rounds away when it is added to W."""
    model = adapted("glm4_moe", torch.bfloat16)
    wrapped = [one for one in fast.outermost(model) if type(one.get_base_layer()) is nn.Linear]
    assert len(wrapped) >= 3  # of the shared expert and of the dense layer
    layer: Any = wrapped[0]
    x = torch.randn(32, layer.in_features, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        (a,), (b,) = layer.lora_A.parameters(), layer.lora_B.parameters()
        a.normal_(std=0.03)
        b.normal_(std=0.003)
        exact = layer.scaling["default"] * (x.double() @ a.double().T @ b.double().T)

        def error() -> float:
            with torch.autocast("cpu", torch.bfloat16):
                change = layer(x) - layer.get_base_layer()(x)
            return float((change.double() - exact).norm() / exact.norm())

        pefts = error()
        undo = experts_path().install(model)
        assert 0 < error() < pefts / 1.5
        undo()
        assert error() == pefts
