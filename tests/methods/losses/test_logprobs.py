"""Log-probabilities of answers: a float64 table from the model's own logits, whatever the layout; a reference sees
neither dropout nor gradients, and leaves no trace in the policy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.plans import adapter_plan, linear_names
from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import IGNORE, Example, PairBatch, collate
from surefoot.methods.losses import logprobs
from surefoot.methods.losses.logprobs import (
    adapter_off,
    answer_logprobs,
    drawn_logprobs,
    frozen,
    token_logprobs,
    with_reference,
)
from surefoot.methods.losses.preference import Constants, preference_loss
from surefoot.methods.losses.sft import supervised_logits
from surefoot.models.adapters import add_adapter
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.forward import logits_at

FP32 = 1e-5  # of sums of some tens of fp32 log-probabilities, each with a softmax over 330 words
draw = np.random.default_rng(3)
LENGTHS = (9, 23, 5, 14)
EXAMPLES = [
    Example(draw.integers(1, 300, length), np.arange(length) >= length // 2, number)
    for number, length in enumerate(LENGTHS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path_factory.mktemp("logprobs") / "llama")).eval()


@torch.no_grad()
def by_hand(model, example: Example) -> list[float]:
    """In float64, from all logits of one example alone."""
    logits = model(torch.tensor(example.ids)[None]).logits[0].double()
    found = logits - logits.exp().sum(-1, keepdim=True).log()
    return [float(found[t - 1, example.ids[t]]) for t in range(1, len(example.ids)) if example.supervised[t]]


@torch.no_grad()
def test_sums_and_tokens(model):
    expected = [by_hand(model, example) for example in EXAMPLES]
    for batch in (collate(EXAMPLES, pad_id=0), collate(EXAMPLES, pad_id=7), collate(EXAMPLES, 0, side="left")):
        found = answer_logprobs(model, batch)
        assert found.sums.dtype == torch.float32
        assert found.sums.tolist() == pytest.approx([sum(one) for one in expected], rel=FP32)
        assert found.tokens.tolist() == [len(one) for one in expected]
        assert found.means.tolist() == pytest.approx([sum(one) / len(one) for one in expected], rel=FP32)
    shifted = collate([Example(one.ids, np.roll(one.supervised, -1), one.number) for one in EXAMPLES], pad_id=0)
    assert answer_logprobs(model, shifted).sums.tolist() != pytest.approx([sum(one) for one in expected], rel=FP32)


@torch.no_grad()
def test_each_token_in_its_place(model):
    found = token_logprobs(model, collate(EXAMPLES, pad_id=0))
    assert found.shape == (len(EXAMPLES), max(LENGTHS))
    for row, example in enumerate(EXAMPLES):
        places = np.flatnonzero(example.supervised) - 1
        assert found[row, places].tolist() == pytest.approx(by_hand(model, example), rel=FP32, abs=FP32)
        rest = np.setdiff1d(np.arange(max(LENGTHS)), places)
        assert not found[row, rest].any()


def test_a_row_without_an_answer_is_zero(model):
    nothing = Example(EXAMPLES[0].ids, np.zeros(len(EXAMPLES[0].ids), dtype=bool), 9)
    found = answer_logprobs(model, collate([nothing, EXAMPLES[1]], pad_id=0))
    assert float(found.sums[0].detach()) == 0 == float(found.means[0].detach())
    alone = answer_logprobs(model, collate([nothing], pad_id=0))
    alone.sums.sum().backward()
    assert all(one.grad is None or not one.grad.any() for one in model.parameters())
    model.zero_grad()


def test_in_pieces_and_its_gradient(model, monkeypatch):
    def loss_and_gradient() -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = answer_logprobs(model, collate(EXAMPLES, pad_id=0)).sums.sum()
        loss.backward()
        return float(loss.detach()), model.lm_head.weight.grad.clone()

    whole = loss_and_gradient()
    monkeypatch.setattr(logprobs, "_POSITIONS", 3)
    pieces = loss_and_gradient()
    assert pieces[0] == pytest.approx(whole[0], rel=FP32)
    assert torch.allclose(pieces[1], whole[1], rtol=FP32, atol=FP32)


@torch.no_grad()
def test_softmax_is_fp32_under_autocast(model):
    """The logits are bf16; what is made of them is exact to fp32."""
    batch = collate(EXAMPLES, pad_id=0)
    with torch.autocast("cpu", torch.bfloat16):
        found = answer_logprobs(model, batch)
        places = (batch.targets.flatten() != IGNORE).nonzero().squeeze(1)
        logits = logits_at(model, batch, places)
    assert logits.dtype == torch.bfloat16
    words = batch.targets.flatten()[places]
    expected = logits.double().log_softmax(-1).gather(1, words[:, None]).sum()
    rounded = logits.log_softmax(-1).gather(1, words[:, None]).double().sum()  # twin: bf16 throughout
    assert float(found.sums.sum()) == pytest.approx(float(expected), rel=FP32)
    assert float(rounded) != pytest.approx(float(expected), rel=FP32)


other = np.random.default_rng(2)
ROWS = collate([Example(other.integers(1, 300, 12), np.arange(12) >= 4, number) for number in range(4)], pad_id=0)


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


DRAWN = torch.tensor([[0, 0, 1, 2, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7, 8]])


@pytest.mark.parametrize("kept", [False, True])
def test_drawn_tokens_a_few_positions_at_a_time(base, monkeypatch, kept):
    """The head is frozen, as under an adapter."""
    model = base().eval()
    model.get_output_embeddings().requires_grad_(False)
    _, targets = supervised_logits(model, ROWS)
    places = torch.arange(len(targets))
    could = torch.cat([DRAWN % len(targets), torch.stack([places, targets])], dim=1) if kept else None

    def measured():
        model.zero_grad()
        found = drawn_logprobs(model, ROWS, 0.7, could)
        (found.tokens * torch.linspace(-1, 2, len(targets))).sum().backward()
        gradients = [one.grad.flatten() for one in model.parameters() if one.grad is not None]
        with torch.no_grad():
            assert drawn_logprobs(model, ROWS, 0.7, could).entropy is None
        return torch.cat([found.tokens.detach(), found.entropy, *gradients])

    plain = measured()
    loss_path(3).install(model)
    assert float((measured() - plain).norm() / plain.norm()) <= FP32
    monkeypatch.setattr(logprobs, "separate", None)
    with pytest.raises(TypeError):  # the twin: that way was taken
        measured()
