"""The profiler sees the kernel that the plan names, and notices another one."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers.faults import raises_fault
from helpers.plans import attention_plan
from surefoot.models.attention import (
    attention_context,
    decoding_context,
    kernels_among,
    observe_kernels,
    verify_attention,
    wide_context,
)
from surefoot.system.errors import EnvironmentFault

IDS = torch.arange(40).reshape(2, 20)


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()


@pytest.fixture
def seen(monkeypatch):
    """Heads of q, k and v that SDPA gets, and whether it is told that they are grouped."""
    seen = set()
    real = F.scaled_dot_product_attention

    def sdpa(q, k, v, **named):
        seen.add((q.shape[1], k.shape[1], v.shape[1], named.get("enable_gqa", False)))
        return real(q, k, v, **named)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    return seen


def forward(model, plan):
    def run():
        with attention_context(plan):
            model(input_ids=IDS).logits.sum().backward()

    return run


@pytest.mark.parametrize(("planned", "other"), [("flash", "math"), ("math", "flash")])
def test_the_planned_kernel_runs_and_another_is_noticed(model, planned, other):
    plan = attention_plan("sdpa", (planned,), expected=planned)
    assert observe_kernels(forward(model, plan)) == {planned}
    assert verify_attention(forward(model, plan), plan) == [planned]
    with raises_fault("SF-PLAN-BROKEN", "attention", planned, other):
        verify_attention(forward(model, attention_plan("sdpa", (other,))), plan)


@pytest.mark.parametrize(
    ("kernels", "heads"), [(("mem_efficient", "math"), 4), (("flash", "mem_efficient", "math"), 2), (("math",), 2)]
)
def test_the_memory_efficient_kernel_gets_every_head_where_it_is_the_only_fused_one(model, seen, kernels, heads):
    """It takes no grouped ones: torch would run the math kernel, and the run would end before its first step."""
    forward(model, attention_plan("sdpa", kernels))()
    assert seen == {(4, heads, heads, heads == 2)}
    forward(model, attention_plan("sdpa", ("math",)))()  # afterwards they are grouped as before
    assert (4, 2, 2, True) in seen


@pytest.mark.parametrize(("device", "heads"), [("cuda", 4), ("cpu", 2)])
def test_a_pass_in_fp32_beside_a_run_gives_every_head_on_a_gpu(model, seen, device, heads):
    """There it would otherwise keep all scores of tokens x tokens, which the run does not."""
    with wide_context(torch.device(device)):
        model(input_ids=IDS)
    assert seen == {(4, heads, heads, heads == 2)}


def test_a_planned_kernel_that_the_device_lacks_does_not_fall_back(model):
    with pytest.raises(RuntimeError, match="backend"):  # torch's
        forward(model, attention_plan("sdpa", ("cudnn",)))()


def test_eager_attention_is_told_apart_from_sdpas_plain_kernel(model):
    plan = attention_plan("eager", (), expected="eager")
    model.set_attn_implementation("eager")
    try:
        assert verify_attention(forward(model, plan), plan) == ["eager"]
    finally:
        model.set_attn_implementation("sdpa")
    with pytest.raises(EnvironmentFault):
        verify_attention(forward(model, attention_plan("sdpa", ("math",))), plan)


class Attends(torch.nn.Module):
    def forward(self, kernel):
        q = torch.randn(1, 2, 8, 8)
        with attention_context(attention_plan("sdpa", (kernel,))):
            return F.scaled_dot_product_attention(q, q, q)


def test_a_tower_takes_the_kernel_that_it_can():
    tower, text = Attends(), Attends()
    plan = attention_plan("sdpa", ("flash",))
    assert verify_attention(lambda: (tower("math"), text("flash")), plan, [tower]) == ["flash"]
    with raises_fault("SF-PLAN-BROKEN", "attention", "flash", "math"):
        verify_attention(lambda: (tower("flash"), text("math")), plan, [tower])
    with raises_fault("SF-PLAN-BROKEN", "attention"):
        verify_attention(lambda: (tower("math"), text("flash")), plan)
    assert not tower._forward_hooks
    assert not tower._forward_pre_hooks


def test_two_kernels_in_one_pass_are_both_seen():
    q = torch.randn(1, 2, 8, 8)

    def both():
        for kernel in ("flash", "math"):
            with attention_context(attention_plan("sdpa", (kernel,))):
                F.scaled_dot_product_attention(q, q, q)

    assert observe_kernels(both) == {"flash", "math"}
    with raises_fault("SF-PLAN-BROKEN", "attention", "flash", "math"):
        verify_attention(both, attention_plan("sdpa", ("flash",)))
    with raises_fault("SF-PLAN-BROKEN", "attention"):
        verify_attention(lambda: q.sum(), attention_plan())


def test_operators_of_other_devices_are_known():
    """Names as torch registers them (native_functions.yaml); backward ones begin alike."""
    for operator, kernel in (
        ("aten::_scaled_dot_product_flash_attention", "flash"),
        ("aten::_scaled_dot_product_flash_attention_backward", "flash"),
        ("aten::_scaled_dot_product_efficient_attention", "mem_efficient"),
        ("aten::_scaled_dot_product_cudnn_attention", "cudnn"),
        ("aten::_scaled_dot_product_attention_math_for_mps", "math"),
        ("flash_attn::_flash_attn_varlen_forward", "flash_attention_2"),
    ):
        assert kernels_among([operator, "aten::softmax"]) == {kernel}
        if operator.startswith("aten::"):
            base = operator.removeprefix("aten::")
            assert hasattr(torch.ops.aten, base), base


def test_decoding_accepts_a_mask_whatever_training_planned():
    q = torch.randn(1, 2, 1, 8)
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    with attention_context(attention_plan("sdpa", ("flash",))), decoding_context():
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask)


def test_observing_is_silent_but_the_observed_code_is_not(capfd):
    observe_kernels(lambda: print("from inside", file=sys.stderr))
    assert capfd.readouterr().err == "from inside\n"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass
    assert "profiler_start" in capfd.readouterr().err  # twin: unmuted, Kineto writes
