"""Adapters on a mixture's experts: against one linear layer and one adapter for each, and against PEFT's own merge."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from helpers.experts import MOE, dense_experts, expert_parameters, moe_model
from helpers.faults import raises_fault
from helpers.plans import adapter_plan, linear_names
from surefoot.models.adapter_targets import adapted_modules, adapted_parameters
from surefoot.models.adapters import add_adapter, add_copy
from surefoot.models.merge import merge_adapter
from surefoot.models.peft import ParamWrapper
from surefoot.models.save import load_adapter_weights, save_adapter
from surefoot.models.saved_adapter import open_adapter, read_adapter

# fp32 against fp64: a few ulps (6e-8) times the depth.
FP32_RELATIVE = 1e-5
IDS = torch.arange(24).reshape(2, 12) * 7 % 70
RANK = 4


def planned(model, kind: str = "lora", **options):
    plan = adapter_plan(linear_names(model), kind, rank=options.pop("rank", RANK), **options)
    return dataclasses.replace(plan, parameters=expert_parameters(model))


def adapted(name: str, *, seed: int = 1, dtype: torch.dtype = torch.float32, rank: int = RANK, **changes) -> PeftModel:
    model = moe_model(name, dtype, **changes)
    return add_adapter(model, planned(model, rank=rank), seed=seed, base="base")


def stir(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


def wrappers(model: PeftModel) -> dict[str, ParamWrapper]:
    """Of the last layer's experts, by parameter."""
    found = [m for name, m in model.named_modules() if isinstance(m, ParamWrapper) and ".experts" in name]
    return {one.parameter_name: one for one in found[-2:]}


def fastest(a: torch.Tensor, b: torch.Tensor, experts: int, number: int):
    """Rows and columns of an expert by the documented order."""
    rank = len(a) // experts
    return a[number * rank : (number + 1) * rank], b[:, number::experts]


def slowest(a: torch.Tensor, b: torch.Tensor, experts: int, number: int):
    rank = len(a) // experts
    return a[number * rank : (number + 1) * rank], b[:, number * rank : (number + 1) * rank]


def few(a: torch.Tensor, b: torch.Tensor, experts: int, number: int):
    """The right order, but without the last expert's delta."""
    a, b = fastest(a, b, experts, number)
    return (a, b) if number < experts - 1 else (a, b * 0)


def dense(layer: ParamWrapper, order, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor):
    """What the experts under `layer` compute in fp64, and the gradients of A and B of both parameters, and of x."""
    experts, pairs, leaves = layer.get_base_layer(), {}, []
    while isinstance(layer, ParamWrapper):
        a, b = (one["default"].weight.detach().double().requires_grad_() for one in (layer.lora_A, layer.lora_B))
        leaves += [a, b]
        parts = [order(a, b, layer.num_experts, number) for number in range(layer.num_experts)]
        pairs[layer.parameter_name] = [(*part, layer.scaling["default"]) for part in parts]
        layer = layer.base_layer
    x = x.detach().double().requires_grad_()
    out = dense_experts(experts, x, index, weights.double(), pairs)
    return out, torch.autograd.grad(out.sin().sum(), [*leaves, x])


CASES = {name: {} for name in MOE} | {
    "as many experts as ranks": {"num_experts": RANK},
    "narrower than the rank": {"moe_intermediate_size": 4, "rank": 8},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_experts_under_an_adapter_are_one_linear_layer_and_one_adapter_each(name):
    model = adapted(name if name in MOE else "qwen3_moe", **CASES[name])
    stir(model)
    outer = next(iter(wrappers(model).values()))
    experts = outer.num_experts
    generator = torch.Generator().manual_seed(5)
    chosen = min(2, experts)
    x = torch.randn(9, 32, generator=generator, requires_grad=True)
    index = torch.stack([torch.randperm(experts, generator=generator)[:chosen] for _ in range(9)])
    index[0, 0] = experts - 1  # each case has tokens for the expert that `few` forgets
    index[0, 1:] = 0
    weights = torch.rand(9, chosen, generator=generator)
    out = outer(x, index, weights)
    leaves, layer = [], outer
    while isinstance(layer, ParamWrapper):
        leaves += [layer.lora_A["default"].weight, layer.lora_B["default"].weight]
        layer = layer.base_layer
    found = [out, *torch.autograd.grad(out.sin().sum(), [*leaves, x])]
    expected, gradients = dense(outer, fastest, x, index, weights)
    assert all(relative(a, b) <= FP32_RELATIVE for a, b in zip(found, [expected, *gradients], strict=True))
    for wrong in (slowest, few):  # twins: B read expert-slowest, an expert's delta dropped
        if wrong is few or experts > 1:
            expected, gradients = dense(outer, wrong, x, index, weights)
            assert relative(out, expected) > 10 * FP32_RELATIVE


@pytest.mark.parametrize("name", MOE)
def test_saved_reloaded_and_merged_it_is_the_same_model(name, tmp_path):
    model = adapted(name)
    stir(model)
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    out = model(input_ids=IDS).logits
    save_adapter(model, tmp_path, save_embedding=False)
    again = PeftModel.from_pretrained(moe_model(name), tmp_path)  # plain PEFT
    assert torch.equal(again(input_ids=IDS).logits, out)
    ours = open_adapter(moe_model(name), read_adapter(tmp_path))
    assert torch.equal(ours(input_ids=IDS).logits, out)
    resumed = adapted(name, seed=9)
    load_adapter_weights(resumed, tmp_path, save_embedding=False)
    assert torch.equal(resumed(input_ids=IDS).logits, out)
    targets = planned(moe_model(name))
    changed = {*targets.parameters, *targets.targets.value}
    merged = merge_adapter(model)
    assert set(merged.layers) == changed
    assert not any("base_layer" in key or "lora" in key for key in merged.model.state_dict())
    theirs = again.merge_and_unload().state_dict()
    for key, tensor in merged.model.state_dict().items():
        assert torch.allclose(tensor, theirs[key], rtol=FP32_RELATIVE, atol=FP32_RELATIVE), key
    assert relative(merged.model(input_ids=IDS).logits, out) <= FP32_RELATIVE


def test_a_merge_that_leaves_an_experts_delta_out_is_another_model():
    model = adapted("mixtral")
    stir(model)
    out = model(input_ids=IDS).logits
    for layer in wrappers(model).values():
        layer.lora_B["default"].weight.data[:, layer.num_experts - 1 :: layer.num_experts] = 0
    assert relative(merge_adapter(model).model(input_ids=IDS).logits, out) > 10 * FP32_RELATIVE


def test_plain_peft_draws_and_names_the_same():
    model, ours = moe_model("qwen2_moe"), adapted("qwen2_moe")
    config = LoraConfig(
        r=RANK,
        lora_alpha=8,
        target_modules="all-linear",
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = get_peft_model(model, config)
    expected = {name: p for name, p in plain.named_parameters() if p.requires_grad}
    found = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    other = dict(adapted("qwen2_moe", seed=2).named_parameters())
    assert not all(torch.equal(found[name], other[name]) for name in found)


def test_a_copy_is_the_same_bit_for_bit():
    model = adapted("mixtral")
    stir(model)
    out = model(input_ids=IDS).logits
    add_copy(model, "other", "default")
    model.set_adapter("other")
    assert torch.equal(model(input_ids=IDS).logits, out)


@pytest.mark.parametrize(
    ("options", "code", "place"),
    [
        ({"kind": "dora"}, "SF-ADAPTER-DORA", "adapter.kind"),
        ({"dropout": 0.1}, "SF-ADAPTER-TARGETS", "adapter.dropout"),
    ],
)
def test_what_peft_has_no_form_for_is_refused(options, code, place):
    model = moe_model("mixtral")
    plan = planned(model, **options)
    with raises_fault(code, place):
        add_adapter(model, plan, seed=1, base="base")
    without = add_adapter(model, dataclasses.replace(plan, parameters=()), seed=1, base="base")  # twin: of linear ones
    assert adapted_parameters(without) == []


def test_one_expert_the_other_way_round_is_refused():
    model = moe_model("gpt_oss", num_local_experts=1, num_experts_per_tok=1)
    first, *others = [
        ("SF-ADAPTER-TARGETS", "adapter.targets", f"model.layers.{layer}.mlp.experts.{name}")
        for layer in (0, 1)
        for name in ("gate_up_proj", "down_proj")
    ]
    with raises_fault(*first, remedy=["adapter.experts"], also=others):
        add_adapter(model, planned(model), seed=1, base="base")


def test_names_are_those_of_the_plan_and_unknown_ones_are_refused():
    model = moe_model("deepseek_v3")
    plan = planned(model)
    found = add_adapter(model, plan, seed=1, base="base")
    assert set(adapted_modules(found)) == set(plan.targets.value)
    assert set(adapted_parameters(found)) == set(plan.parameters)
    with raises_fault("SF-ADAPTER-TARGETS", "adapter.targets"):
        wrong = dataclasses.replace(plan, parameters=("model.layers.1.mlp.experts.w1",))
        add_adapter(moe_model("deepseek_v3"), wrong, seed=1, base="base")
