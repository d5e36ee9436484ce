"""Log likelihoods of options against one plain forward pass of transformers for each option."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.tiers import representatives
from helpers.zoo import ZOO
from surefoot.models import continuations
from surefoot.models.continuations import log_likelihoods

PROMPTS = [[5, 9, 17, 33], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48]]
ONE_DIGIT = [[[20, 21, 22, 30], [20, 21, 22, 31]], [[20, 30], [20, 31], [20, 32]], [[30], [31]]]
TAILS = [[[20, 21, 22, 30], [20, 21, 31, 32, 33]], [[20], [21, 22]], [[30, 31, 32], [30, 31], [30, 31, 32, 33]]]
ROUNDING = 2e-5  # nats; sums of a few fp32 log probabilities, computed in batches of other shapes


@pytest.fixture(scope="module", params=representatives(ZOO, "llama3", "gemma2", "gpt2"))
def model(request, tmp_path_factory):
    folder = ZOO[request.param](tmp_path_factory.mktemp("options") / request.param)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.no_grad()
def reference(model, prompt: list[int], option: list[int]) -> float:
    logits = model(torch.tensor([prompt + option])).logits[0].double().log_softmax(dim=-1)
    return sum(float(logits[len(prompt) - 1 + place, token]) for place, token in enumerate(option))


def largest_error(model, options) -> float:
    found = log_likelihoods(model, PROMPTS, options, pad_id=3)
    assert [len(scores) for scores in found] == [len(several) for several in options]
    return max(
        abs(score - reference(model, prompt, option))
        for prompt, several, scores in zip(PROMPTS, options, found, strict=True)
        for option, score in zip(several, scores, strict=True)
    )


@pytest.mark.parametrize("options", [ONE_DIGIT, TAILS], ids=["one digit", "tails"])
def test_sums_are_those_of_whole_forward_passes(model, options):
    assert largest_error(model, options) < ROUNDING


def test_twin_a_padding_that_is_attended_is_noticed(model, monkeypatch):
    def unmasked(prompts, pad_id, device):
        ids, mask = left_padded(prompts, pad_id, device)
        return ids, torch.ones_like(mask)

    left_padded = continuations.left_padded
    monkeypatch.setattr(continuations, "left_padded", unmasked)
    assert largest_error(model, ONE_DIGIT) > ROUNDING


def test_twin_a_mean_over_tokens_is_noticed(model):
    found = log_likelihoods(model, PROMPTS, TAILS, pad_id=3)[0][1] / len(TAILS[0][1])
    assert abs(found - reference(model, PROMPTS[0], TAILS[0][1])) > ROUNDING


def test_options_that_differ_by_one_token_need_no_cache(model, monkeypatch):
    monkeypatch.setattr(continuations, "decoding_cache", lambda _: pytest.fail("made a cache"))
    log_likelihoods(model, PROMPTS, ONE_DIGIT, pad_id=3)
