"""A reference sees neither dropout nor gradients, and leaves no trace in the policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.plans import adapter_plan, linear_names
from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import Example, PairBatch, collate
from surefoot.methods.losses.logprobs import adapter_off, answer_logprobs, frozen, with_reference
from surefoot.methods.losses.preference import Constants, preference_loss
from surefoot.models.adapters import add_adapter

draw = np.random.default_rng(2)
ROWS = collate([Example(draw.integers(1, 300, 12), np.arange(12) >= 4, number) for number in range(4)], pad_id=0)


@pytest.fixture
def base(tmp_path):
    folder = tiny_llama(tmp_path / "llama", attention_dropout=0.3)
    return lambda: AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")


@pytest.fixture
def policy(base):
    """Moved away from its base, in training mode, with dropout."""
    model = base()
    adapted = add_adapter(model, adapter_plan(linear_names(model), "lora"), seed=1, base="base").train()
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    return adapted


@torch.no_grad()
def test_the_base_under_the_adapter(base, policy):
    expected = answer_logprobs(base().eval(), ROWS).sums
    trains = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    found = adapter_off(policy)(ROWS)
    assert torch.equal(found, expected)
    assert torch.equal(adapter_off(policy)(ROWS), found)  # no draw
    assert policy.training
    assert {name: parameter.requires_grad for name, parameter in policy.named_parameters()} == trains
    assert not torch.allclose(frozen(policy)(ROWS), expected)  # twin: the adapter is on
    assert not torch.equal(answer_logprobs(policy, ROWS).sums, answer_logprobs(policy, ROWS).sums)  # twin: dropout


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_gradients_are_those_of_a_reference_that_was_known(policy, dtype):
    """Under autocast too, whose cache of cast weights must not keep what the pass without gradients made."""
    policy.eval()
    objective = preference_loss("sigmoid", Constants(0.1))
    reference = adapter_off(policy)
    batch = PairBatch(ROWS, (4, 4), 2)

    def gradients(known: bool) -> list[torch.Tensor]:
        policy.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            made = PairBatch(ROWS, (4, 4), 2, reference=reference(ROWS)) if known else batch
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            with_reference(objective, reference)(policy, made).loss.backward()
        return [one.grad.clone() for one in policy.parameters() if one.grad is not None]

    before, within = gradients(known=True), gradients(known=False)
    assert before
    assert len(before) == len(within)
    assert all(torch.equal(*both) for both in zip(before, within, strict=True))
