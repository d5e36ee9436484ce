"""What ten steps and a few passes show: every cause is planted, and named; without it there is no such line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from helpers.doctor_runs import clean_run, plant_in_loss
from surefoot.commands.doctor import steps
from surefoot.commands.doctor.passes import observed_pass
from surefoot.commands.doctor.steps import STEPS, few, product_line, take
from surefoot.models import product_flops
from surefoot.models.forward import causal_model
from surefoot.planning.measurements import AttentionTrial, Measurements
from surefoot.runs import plan as planned
from surefoot.runs.trial import ready


@pytest.fixture
def one_bf16(folder, base):
    with ready(clean_run(folder, base, precision="bf16"), STEPS) as prepared:
        yield prepared


def verdicts(lines):
    return {line.code: line.verdict for line in lines}


def test_ten_clean_steps(one):
    taken = take(one)
    assert len(taken.reports) == STEPS
    found = verdicts(steps.number_lines(taken, "fp32", falls=True))
    assert set(found) == {"LOSS-FINITE", "LOSS-ZERO", "GRAD-NORM", "LOSS-FALLING"}
    assert set(found.values()) == {"ok"}


def test_steps_that_take_very_long_are_fewer_and_enough(one, monkeypatch):
    monkeypatch.setattr(steps, "_PATIENCE", 0.0)
    taken = take(one)
    assert len(taken.reports) == steps._ENOUGH < STEPS
    assert verdicts(steps.number_lines(taken, "fp32", falls=True))["LOSS-FINITE"] == "ok"


@pytest.mark.parametrize(
    ("code", "verdict", "change"),
    [
        ("LOSS-FINITE", "fault", lambda loss, batch: loss * float("nan")),
        ("LOSS-ZERO", "fault", lambda loss, batch: loss * 0.0),
        ("GRAD-NORM", "caution", lambda loss, batch: loss * 1e6),
        ("LOSS-FALLING", "caution", lambda loss, batch: loss.detach() * 2 - loss),  # climbs
    ],
)
def test_numbers_that_are_wrong(one, code, verdict, change):
    lines = steps.number_lines(take(plant_in_loss(one, change)), "fp32", falls=True)
    assert verdicts(lines)[code] == verdict
    assert next(line for line in lines if line.code == code).fix


def test_what_is_not_finite_in_fp32_is_not_sent_to_fp32(one):
    taken = take(plant_in_loss(one, lambda loss, batch: loss * float("nan")))
    fixes = {compute: steps.number_lines(taken, compute, falls=True)[0].fix for compute in ("fp32", "bf16")}
    assert all("optim.lr" in fix for fix in fixes.values())
    assert {compute: "precision.compute" in fix for compute, fix in fixes.items()} == {"fp32": False, "bf16": True}


def products_of(one, compute, measured):
    return product_line(one, observed_pass(one), compute, measured)


def outside_autocast(module):
    """As a layer that means well multiplies: upcast, with autocast off."""
    module.forward = lambda x: _in_fp32(module, x)


def _in_fp32(module, x):
    with torch.autocast("cpu", enabled=False):
        return F.linear(x.float(), module.weight.float())


def test_a_bf16_run_with_surefoots_own_kernels_multiplies_in_bf16(one_bf16):
    assert products_of(one_bf16, "bf16", Measurements()).verdict == "ok"


def test_fp32_products_in_a_bf16_run_are_named_with_their_modules(folder, base):
    measured = Measurements(products={"fp32": 1e11, "bf16": 8e11})
    plain = {"adapter": "plain"}  # which calls the modules that the plant is in
    with ready(clean_run(folder, base, precision="bf16", kernels=plain), STEPS) as one:
        assert products_of(one, "bf16", measured).verdict == "ok"
        for layer in causal_model(one.setup.policy).model.layers:
            outside_autocast(layer.mlp.down_proj.get_base_layer())
        line = products_of(one, "bf16", measured)
    assert (line.code, line.verdict) == ("GEMM-FP32-SHARE", "caution")
    assert "mlp.down_proj" in line.value
    assert line.gain is not None
    assert 1 < line.gain < 8


@pytest.fixture
def packed(folder, base, monkeypatch):
    """As planned where attention by products was measured to be the fastest."""
    seen = Measurements(documents=(AttentionTrial("matmul", 1.0, ""),))
    monkeypatch.setattr(planned, "_measure", lambda *asked: seen)
    config = clean_run(folder, base, precision="bf16")
    config = config.model_copy(update={"data": config.data.model_copy(update={"packing": "on"})})
    with ready(config, STEPS) as one:
        assert one.plan.kernels.documents.value == "matmul"
        yield one


def test_fp32_products_in_an_attention_layer_are_seen_in_packed_rows_too(packed):
    """These have logits in fp32 on purpose: those alone are left out, not all that runs in such a layer."""
    clean = products_of(packed, "bf16", Measurements())
    assert (clean.verdict, clean.value) == ("ok", "0.0%")
    for layer in causal_model(packed.setup.policy).model.layers:
        scores_in_fp32(layer.self_attn)
    line = products_of(packed, "bf16", Measurements())
    assert (line.code, line.verdict) == ("GEMM-FP32-SHARE", "caution")
    assert "self_attn " in line.value


def test_twin_logits_of_packed_documents_would_be_named_if_they_were_not_left_out(packed, monkeypatch):
    monkeypatch.setattr(product_flops, "logits_are_wider", lambda: False)
    monkeypatch.setattr(steps, "FP32", 0.0)
    assert "self_attn" in products_of(packed, "bf16", Measurements()).value


def scores_in_fp32(layer):
    """As an attention that computes its scores by hand, beside what it calls."""
    plain = layer.forward

    def forward(hidden_states, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            wide = hidden_states.float()
            for _ in range(3):
                scores = wide @ wide.transpose(1, 2)
        output, *others = plain(hidden_states, *args, **kwargs)
        return output + 0 * scores.sum(), *others

    layer.forward = forward


def test_what_the_math_kernel_multiplies_in_fp32_is_not_the_modules_fault(folder, base, monkeypatch):
    forced = {"implementation": "sdpa", "flash": "off", "mem_efficient": "off", "cudnn": "off", "math": "on"}
    data = {"train": str(folder / "train.json"), "max_length": 128, "packing": "off"}
    with ready(clean_run(folder, base, precision="bf16", attention=forced, data=data), STEPS) as one:
        assert products_of(one, "bf16", Measurements()).verdict == "ok"
        monkeypatch.setattr(steps, "FP32", 0.001)
        seen = observed_pass(one)
        assert seen.kernels == {"math"}
        unknown = replace(seen, kernels=set())  # the twin: nobody knows which kernel runs
        line = product_line(one, unknown, "bf16", Measurements())
        assert (line.verdict, "self_attn" in line.value) == ("caution", True)
        assert product_line(one, seen, "bf16", Measurements()).verdict == "ok"


def test_an_fp32_run_has_fp32_products(one):
    assert products_of(one, "fp32", Measurements()).verdict == "ok"


@pytest.mark.parametrize(("count", "places"), [(1, [0]), (2, [0, 1]), (3, [0, 2]), (7, [0, 6])])
def test_few_micro_batches_of_a_step_are_its_longest_and_its_shortest(count, places):
    assert few(list(range(count))) == places
