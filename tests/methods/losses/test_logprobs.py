"""Log-probabilities of answers: a float64 table from the model's own logits, whatever the layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import IGNORE, Example, collate
from surefoot.methods.losses import logprobs
from surefoot.methods.losses.logprobs import answer_logprobs, token_logprobs
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
