"""Set-up that matches the plan passes; every single departure is one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.faults import raises_fault
from helpers.plans import adapter_plan, attention_plan, choice, linear_names, precision_plan, run_plan
from helpers.tiers import representatives
from helpers.tiny_models import tiny_llama
from helpers.zoo_modern import MODERN
from surefoot.models import verify as module
from surefoot.models.adapters import add_adapter
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.load import load_model
from surefoot.models.verify import verify_head, verify_model
from surefoot.system.errors import EnvironmentFault

CPU = torch.device("cpu")
OTHER_ROWS = 4  # times eps: a product of three rows may sum in another order than one of eight; 1.5 seen without AMX


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(tied=True)


def load_models(folder: Path, base: str = "bf16", kind: str = "dora"):
    """A model and the plan that describes it."""
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[base]
    model = load_model(folder, dtype=dtype, attention_implementation="sdpa", device=CPU)
    parameters = sum(p.numel() for p in model.parameters())
    adapter = None if kind == "full" else adapter_plan(linear_names(model), kind)
    if adapter:
        model = add_adapter(model, adapter, seed=1, base="base")
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    precision = precision_plan("bf16", base)  # type: ignore[arg-type]
    return model, run_plan(trainable=trainable, parameters=parameters, precision=precision, adapter=adapter)


@pytest.mark.parametrize(("base", "kind"), [("bf16", "dora"), ("fp32", "lora"), ("fp32", "full")])
def test_a_faithful_set_up_is_recorded(folder, base, kind):
    model, plan = load_models(folder, base, kind)
    found = verify_model(model, plan)
    assert json.loads(json.dumps(found)) == found
    assert found["trainable_dtypes"] == ["float32"]
    assert found["frozen_dtypes"] == ([] if kind == "full" else [{"bf16": "bfloat16", "fp32": "float32"}[base]])
    assert found["tied"] is True
    assert len(found["targets"]) == (0 if kind == "full" else 14)


def halve_one_trainable(model: nn.Module) -> None:
    next(p for p in model.parameters() if p.requires_grad).data = torch.zeros(4, 32, dtype=torch.bfloat16)


def widen_one_frozen(model: nn.Module) -> None:
    frozen = next(p for p in model.parameters() if not p.requires_grad)
    frozen.data = frozen.data.float()


def unfreeze_one(model: nn.Module) -> None:
    parameter = next(p for p in model.parameters() if not p.requires_grad)
    parameter.requires_grad_(True)


def untie(model: nn.Module) -> None:
    head = model.get_base_model().lm_head
    head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)


@pytest.mark.parametrize(
    ("break_it", "departures"),
    [
        (halve_one_trainable, [("trainable_dtypes", "bfloat16", "float32")]),
        (widen_one_frozen, [("frozen_dtypes", "bfloat16", "float32")]),
        (unfreeze_one, [("trainable_dtypes", "float32", "bfloat16"), ("trainable", 4608, 15136)]),
        (untie, [("tied", True, False)]),
        (lambda model: model.get_base_model().set_attn_implementation("eager"), [("attention", "sdpa", "eager")]),
        (enable_gradient_checkpointing, [("gradient_checkpointing", False, True), ("recomputed_layers", 0, 2)]),
        (lambda model: model.unload(), [("trainable_dtypes", "float32"), ("trainable", 4608, 0), ("targets", 14)]),
    ],
    ids=["trainable dtype", "frozen dtype", "unfrozen", "untied", "attention", "checkpointing", "adapter gone"],
)
def test_each_departure_is_reported(folder, break_it, departures):
    model, plan = load_models(folder)
    verify_model(model, plan)
    break_it(model)
    first, *others = [("SF-PLAN-BROKEN", f"plan: {place}", *values) for place, *values in departures]
    with raises_fault(*first, also=others):
        verify_model(model, plan)


@pytest.mark.parametrize("family", representatives(("ernie4_5_moe", "hunyuan_v1_moe", "olmo_hybrid"), "hunyuan_v1_moe"))
def test_what_transformers_keeps_in_fp32_is_no_departure(tmp_path, family):
    """Routers and rates of decay, whatever type is asked for."""
    folder = MODERN[family](tmp_path / "base")
    model = load_model(folder, dtype=torch.bfloat16, attention_implementation="sdpa", device=CPU)
    frozen = dict(model.named_parameters())
    wide = [name for name, one in frozen.items() if one.dtype == torch.float32]
    assert 0 < len(wide) < len(frozen)
    narrow = list(module._narrowed(model, frozen, torch.bfloat16))
    assert {one.dtype for one in narrow} == {torch.bfloat16}
    assert len(narrow) == len(frozen) - len(wide)
    other = next(one for name, one in frozen.items() if name not in wide)
    other.data = other.data.float()  # twin: one that it does not keep
    assert any(one is other for one in module._narrowed(model, frozen, torch.bfloat16))


def test_a_plan_for_another_device_or_attention_is_reported_in_full(folder):
    model, plan = load_models(folder)
    plan = replace(plan, device=choice("cuda"), attention=attention_plan("eager", (), "eager"))
    with pytest.raises(EnvironmentFault) as error:
        verify_model(model, plan)
    assert [fault.where for fault in error.value.faults] == ["plan: attention", "plan: devices"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_head_of_a_mixed_model_is_its_own(tmp_path, dtype):
    folder = tiny_llama(tmp_path / "untied")
    model = load_model(folder, dtype=dtype, attention_implementation="sdpa", device=CPU)
    plan = adapter_plan(linear_names(model), modules_to_save=("lm_head",))
    model = add_adapter(model, plan, seed=1, base="base", autocast=dtype != torch.float32)
    assert verify_head(model, CPU) <= OTHER_ROWS * torch.finfo(dtype).eps


def forward_with(change):
    """The model's forward, its logits changed at the end."""

    def replace_in(base, monkeypatch):
        plain = base.forward

        def forward(*args, **kwargs):
            output = plain(*args, **kwargs)
            output.logits = change(output.logits)
            return output

        monkeypatch.setattr(base, "forward", forward)

    return replace_in


@pytest.mark.parametrize("change", [lambda logits: logits / 8, lambda logits: 2 * (logits / 2).tanh()])
def test_a_model_that_scales_or_caps_its_logits_does_so_for_chosen_positions_too(folder, monkeypatch, change):
    model, _ = load_models(folder)
    forward_with(change)(model.get_base_model(), monkeypatch)
    assert verify_head(model.train(), CPU) == 0.0
    assert model.training


def test_a_model_that_mixes_positions_is_found(folder, monkeypatch):
    model, _ = load_models(folder)
    forward_with(lambda logits: logits.cumsum(1))(model.get_base_model(), monkeypatch)
    with raises_fault("SF-MODEL-NUMBERS", "LlamaForCausalLM"):
        verify_head(model, CPU)


def test_a_head_that_is_not_called_as_a_module_is_found(folder, monkeypatch):
    model, _ = load_models(folder)
    head = model.get_base_model().lm_head
    monkeypatch.setattr(type(head), "__call__", lambda self, x: self.forward(x))
    with raises_fault("SF-MODEL-NUMBERS", "LlamaForCausalLM", "inf"):
        verify_head(model, CPU)


def test_weights_that_overflow_are_no_fault_of_the_architecture(folder):
    model, _ = load_models(folder)
    with torch.no_grad():
        model.get_base_model().model.norm.weight.fill_(torch.finfo(torch.bfloat16).max)
    with raises_fault("SF-MODEL-NUMBERS", "LlamaForCausalLM"):
        verify_head(model, CPU)
