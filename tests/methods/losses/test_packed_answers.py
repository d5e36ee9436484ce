"""Answers in packed rows: every loss that compares or judges them has the value, gradients and sums of padded rows.

The models compute in float64; what the losses are made of, log-probabilities and scores, is rounded to fp32 as in
every run.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from helpers.architectures import LLAMA, build
from helpers.plans import adapter_plan, linear_names
from models.test_value_head import drawn_head
from surefoot.data.batching.batch import Example, JudgedBatch, PairBatch
from surefoot.data.batching.loader import Layout, to_batch
from surefoot.kernels import packed_attention as kernels
from surefoot.methods.losses.kto import Weights, kto_loss
from surefoot.methods.losses.logprobs import adapter_off, frozen, with_reference
from surefoot.methods.losses.preference import LOSSES, Constants, preference_loss
from surefoot.methods.losses.reward import LOSSES as REWARD_LOSSES
from surefoot.methods.losses.reward import reward_objective
from surefoot.models import forward as documents
from surefoot.models.adapters import add_adapter
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.packing import packed_attention
from surefoot.models.value_head import ScoredModel, value_width

# The states agree to float64's last places; their logits, a few dozen fp32 numbers to a sum, are rounded to 6e-8 each.
SAME = 1e-6
PADDED, PACKED = Layout(0), Layout(0, packed=True)
ANSWERS = [(9, 3, 5), (4, 6, 2), (12, 1, 4), (2, 7, 7)]  # prompt, better answer, worse answer


def answered(rng, prompt: np.ndarray, length: int, number: int) -> Example:
    ids = np.concatenate([prompt, rng.integers(3, 60, length)])
    return Example(ids, np.arange(len(ids)) >= len(prompt), number)


def pairs(layout: Layout, *, reference: bool = True) -> PairBatch:
    rng = np.random.default_rng(0)
    sides: tuple[list[Example], list[Example]] = ([], [])
    for number, (prompt, *lengths) in enumerate(ANSWERS):
        asked = rng.integers(3, 60, prompt)
        for side, length in enumerate(lengths):
            sides[side].append(answered(rng, asked, length, number))
    examples = [*sides[0], *sides[1]]
    common = []
    for better, worse in zip(*sides, strict=True):
        shorter = min(len(better.ids), len(worse.ids))
        differs = np.flatnonzero(better.ids[:shorter] != worse.ids[:shorter])
        common.append(int(differs[0]) if len(differs) else shorter)
    known = torch.linspace(-30, -10, len(examples)) if reference else None
    return PairBatch(to_batch(examples, layout), tuple(common), len(ANSWERS), 0.25, known)


def judged(layout: Layout, *, reference: bool = True) -> JudgedBatch:
    batch = pairs(layout)
    good = torch.tensor([True, True, False, True, False, False, True, False])
    known = batch.reference if reference else None
    return JudgedBatch(batch.rows, good, None, 8, 0.3, known, good_share=2.0, bad_share=2.0)


def language_model() -> nn.Module:
    torch.manual_seed(0)
    model = build(LLAMA, device="cpu", attn_implementation="sdpa").double().train()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def model():
    return language_model()


@pytest.fixture(scope="module")
def scored():
    inner = language_model()
    return ScoredModel(inner, drawn_head(value_width(inner)))


def measured(model, objective, batch) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss and gradients in one row of numbers, and the sums."""
    model.zero_grad()
    out = objective(model, batch)
    out.loss.backward()
    gradients = [one.grad.flatten().double() for one in model.parameters() if one.grad is not None]
    sums = {name: float(value) for name, value in out.sums.items()}
    return torch.cat([out.loss.detach().double()[None], *gradients]), sums


def difference(model, objective, padded, packed, form: str = "sdpa") -> float:
    """As a share; infinite where the sums differ by more."""
    wanted, sums = measured(model, objective, padded)
    undo = packed_attention(form).install(model)
    try:
        found, others = measured(model, objective, packed)
    finally:
        undo()
    assert others == pytest.approx(sums, rel=SAME, abs=SAME)
    return float((found - wanted).norm() / wanted.norm())


def test_prompts_that_are_learned_too_are_those_of_padded_rows(model):
    objective = preference_loss("orpo", Constants(0.2), prompts=True)
    padded, packed = (replace(pairs(layout, reference=False), row_share=0.1) for layout in (PADDED, PACKED))
    assert difference(model, objective, padded, packed) < SAME
    assert difference(model, preference_loss("orpo", Constants(0.2)), padded, packed) < SAME
    assert difference(model, objective, padded, replace(packed, row_share=0.11)) > 10 * SAME


@pytest.mark.parametrize("form", ["sdpa", "matmul"])
@pytest.mark.parametrize("sft", [0.0, 0.7])
@pytest.mark.parametrize("name", LOSSES)
def test_every_preference_loss(model, name, sft, form):
    objective = preference_loss(name, Constants(0.2, label_smoothing=0.1, margin=0.3), sft)
    assert difference(model, objective, pairs(PADDED), pairs(PACKED), form) <= SAME


def test_kto(model):
    assert difference(model, kto_loss(Weights(0.2, 1.3, 0.7)), judged(PADDED), judged(PACKED)) <= SAME


@pytest.mark.parametrize("center", [0.0, 0.1])
@pytest.mark.parametrize("surplus", [0, 2])
@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_every_reward_loss(scored, name, surplus, center):
    objective = reward_objective(name, center=center, surplus=surplus, shared=True)  # what is packed is not shared
    whole = reward_objective(name, center=center, surplus=surplus)
    padded, packed = pairs(PADDED), pairs(PACKED)
    wanted, sums = measured(scored, whole, padded)
    undo = packed_attention("sdpa").install(scored)
    found, others = measured(scored, objective, packed)
    undo()
    assert float((found - wanted).norm() / wanted.norm()) <= SAME
    assert others == pytest.approx(sums, rel=SAME, abs=SAME)


def test_twin_documents_that_hear_of_one_another(model, monkeypatch):
    def one_document(q, k, v, found, scale):
        return kernels.sdpa(q, k, v, kernels.documents_of([q.shape[2]], q.device), scale)

    monkeypatch.setitem(documents.FORMS, "sdpa", one_document)
    with pytest.raises(AssertionError):
        test_every_preference_loss(model, "sigmoid", 0.0, "sdpa")


def test_twin_answers_in_another_order(model):
    packed = pairs(PACKED)
    turned = replace(packed, reference=packed.reference.flip(0))
    with pytest.raises(AssertionError):
        difference(model, preference_loss("sigmoid", Constants(0.2)), pairs(PADDED), turned)


@pytest.mark.parametrize("kind", ["adapter off", "second model"])
def test_the_reference_looks_at_packed_rows_too(kind):
    base = language_model()
    policy = add_adapter(base, adapter_plan(targets=linear_names(base)), seed=0, base="base")
    with torch.no_grad():
        for name, one in policy.named_parameters():
            if "lora_B" in name:
                one += 0.1
    second = language_model()
    packed_attention("sdpa").install(second)
    reference = adapter_off(policy) if kind == "adapter off" else frozen(second)
    objective = with_reference(preference_loss("ipo", Constants(0.2)), reference)
    packed, padded = (pairs(layout, reference=False) for layout in (PACKED, PADDED))
    assert difference(policy, objective, padded, packed) <= SAME
    judging = with_reference(kto_loss(Weights(0.2)), reference)
    assert difference(policy, judging, judged(PADDED, reference=False), judged(PACKED, reference=False)) <= SAME


def test_a_chunked_head_computes_the_same_from_packed_rows():
    base = language_model().float()
    policy = add_adapter(base, adapter_plan(targets=linear_names(base)), seed=0, base="base")
    objective = preference_loss("sigmoid", Constants(0.2), 0.5)
    wanted, sums = measured(policy, objective, pairs(PADDED))
    packed_attention("sdpa").install(policy)
    loss_path(rows=4).install(policy)
    found, others = measured(policy, objective, pairs(PACKED))
    assert float((found - wanted).norm() / wanted.norm()) <= 10 * SAME  # all of it in fp32
    assert others == pytest.approx(sums, rel=10 * SAME, abs=10 * SAME)


def test_a_blank_batch_runs(model, scored):
    undo = packed_attention("sdpa").install(model), packed_attention("sdpa").install(scored)
    blank = pairs(PACKED).blank()
    assert torch.isfinite(preference_loss("sigmoid", Constants(0.2))(model, blank).loss)
    assert torch.isfinite(reward_objective("divergence")(scored, blank).loss)
    assert torch.isfinite(kto_loss(Weights(0.2))(model, judged(PACKED).blank()).loss)
    for one in undo:
        one()
