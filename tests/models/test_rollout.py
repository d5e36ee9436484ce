"""Rollouts: the tokens that each prompt gives alone, and how likely the policy finds them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import zoo
from helpers.tiers import diagonal, representatives
from helpers.zoo_adapters import adapted
from surefoot.data.batching.batch import Example, collate
from surefoot.models import generate
from surefoot.models.adapters import CachedNorms
from surefoot.models.forward import causal_model, logits_at
from surefoot.models.generate import Decoding, draw_steps
from surefoot.models.rollout import EmbeddedRollouts, Rollout

PROMPTS = [[320, 7, 9, 200, 33], [320, 41], [320, *range(50, 75)], [320, 41], [320, 8, 8, 61, 70, 12, 13]]
ASKED = Decoding(max_new_tokens=24, stop_ids=frozenset(range(280, 322)), pad_id=321, temperature=1.0, seed=5)
# fp32 logits of up to about 10 (ulp 1e-6), summed in another order for another number of rows or columns, and with a
# mask that adds 0: a few ulps.
LOG_PROBABILITY = 2e-5


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(hidden=64)


@pytest.fixture
def model(folder):
    """Weights five times their usual size, so that answers depend on their prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 5
    return model


def rollouts(model, prompts=PROMPTS, rows=8, places=None, **options) -> list[Rollout]:
    return EmbeddedRollouts(model, rows).answer(prompts, replace(ASKED, **options), places)


def assert_same(found: list[Rollout], expected: list[Rollout]) -> None:
    assert [(one.prompt, one.response, one.stopped) for one in found] == [
        (one.prompt, one.response, one.stopped) for one in expected
    ]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=LOG_PROBABILITY)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"temperature": 0.0}])
def test_answers_do_not_depend_on_how_prompts_are_split(model, options):
    together = rollouts(model, **options)
    for rows in (1, 3):
        assert_same(rollouts(model, rows=rows, **options), together)
    shares = [[0, 2, 4], [1, 3]]
    for share in shares:
        found = rollouts(model, [PROMPTS[one] for one in share], places=share, **options)
        assert_same(found, [together[one] for one in share])
    lengths = {len(one.response) for one in together}
    if options.get("temperature") != 0:
        assert together[1].response != together[3].response  # one prompt, two places: two draws
        assert len(lengths) > 2  # rows were dropped on the way
        assert rollouts(model, **options | {"seed": 6}) != together
    wrong = rollouts(model, [PROMPTS[one] for one in shares[1]], **options)  # twin: streams of other places
    if options.get("temperature") != 0:
        assert [one.response for one in wrong] != [together[1].response, together[3].response]


@pytest.mark.parametrize("family", representatives(zoo.ZOO, "llama3", "mistral", "gemma2", "opt", "gpt2"))
def test_a_prompt_alone_needs_no_mask(zoo_model, family):
    """Answers longer than the families' windows, with left padding and a mask, and without either."""
    model = AutoModelForCausalLM.from_pretrained(zoo_model(family)).eval()
    prompts = [[one % model.config.vocab_size for one in prompt] for prompt in PROMPTS]
    asked = {"stop_ids": range(60, 64), "pad_id": 0}
    assert_same(rollouts(model, prompts, rows=1, **asked), rollouts(model, prompts, **asked))


@pytest.mark.parametrize(("family", "temperature"), diagonal(["llama3", "gemma2", "opt", "gpt2"], [1.0, 0.6]))
def test_log_probabilities_are_those_of_the_training_forward(zoo_model, family, temperature):
    """At the temperature, among all tokens: what PPO computes anew with right padding and without a cache."""
    folder = zoo_model(family)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    prompts = [[one % model.config.vocab_size for one in prompt] for prompt in PROMPTS]
    found = rollouts(model, prompts, temperature=temperature, top_p=0.9, stop_ids=range(60, 80), pad_id=0)
    for one in found:
        ids = torch.tensor([*one.prompt, *one.response]).numpy()
        batch = collate([Example(ids, ids >= 0, 0)], 0)
        places = torch.arange(len(one.prompt) - 1, len(ids) - 1)
        with torch.no_grad():
            everything = (logits_at(model, batch, places).double() / temperature).log_softmax(-1)
        expected = everything.gather(1, torch.tensor(one.response)[:, None]).squeeze(1).tolist()
        assert one.logprobs == pytest.approx(expected, abs=LOG_PROBABILITY)
        assert one.stopped == (60 <= one.response[-1] < 80)
        assert not any(60 <= token < 80 for token in one.response[:-1])
    assert any(one.stopped for one in found)
    assert not all(one.stopped for one in found) or len({len(one.response) for one in found}) > 1


def test_in_bf16_with_eager_attention_they_are_those_of_whole_sequences_to_the_bit(folder, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()

    def apart() -> float:
        (found, *_) = rollouts(model, [PROMPTS[1]] * 6)
        with torch.no_grad():
            logits = model(torch.tensor([[*found.prompt, *found.response]])).logits[0, len(found.prompt) - 1 : -1]
        whole = logits.float().log_softmax(-1).gather(1, torch.tensor(found.response)[:, None]).squeeze(1)
        return (whole - torch.tensor(found.logprobs)).abs().max().item()

    assert apart() == 0
    kernel = torch.Tensor.log_softmax  # twin: the same number by another formula
    # in the last place: x - logsumexp(x) alone is the same number on some processors
    other = 1 + torch.finfo(torch.float32).eps
    monkeypatch.setattr(torch.Tensor, "log_softmax", lambda x, dim: (x - x.logsumexp(dim, keepdim=True)) * other)
    (found, *_) = rollouts(model, [PROMPTS[1]] * 6)
    monkeypatch.setattr(torch.Tensor, "log_softmax", kernel)
    assert found.logprobs != rollouts(model, [PROMPTS[1]] * 6)[0].logprobs


def test_finished_rows_leave_the_batch(model, monkeypatch):
    sizes = []
    whole = generate.next_logits
    monkeypatch.setattr(generate, "next_logits", lambda *a, **k: sizes.append(a[1].shape[0]) or whole(*a, **k))
    found = rollouts(model)
    work = sum(sizes)
    sizes.clear()
    monkeypatch.setattr(generate, "_FINISHED", 2.0)  # twin: never
    assert_same(rollouts(model), found)
    assert sizes[0] == len(PROMPTS) - 1  # two prompts are equal
    assert work < sum(sizes) == len(PROMPTS) * max(len(one.response) for one in found) - 1
    assert work == sum(len(one.response) for one in found) - 1


def test_ranks_go_on_together(model):
    """A rank that is done, or has no prompt at all, does the steps of the others."""
    wanted = [len(one.response) for one in rollouts(model, rows=1)]
    asked = []

    def others_run(running: bool) -> bool:
        asked.append(running)
        return running or len(asked) <= 80

    assert_same(EmbeddedRollouts(model, 8, keep_going=others_run).answer(PROMPTS, ASKED), rollouts(model))
    assert len(asked) > 80
    assert max(wanted) < 80
    asked.clear()
    assert EmbeddedRollouts(model, 8, keep_going=others_run).answer([], ASKED) == []
    assert len(asked) > 80
    assert not any(asked)


@pytest.mark.parametrize("family", representatives(zoo.ZOO, "llama3", "phi3", "gpt2"))
def test_held_norms_change_no_bit(zoo_model, family, monkeypatch):
    folder = zoo_model(family)
    model = adapted(folder, "dora", 1).eval()
    prompts = [[one % causal_model(model).config.vocab_size for one in prompt] for prompt in PROMPTS]
    decoding = Decoding(8, (), 0, 1.0, 1.0, 3)
    held = list(draw_steps(model, prompts, decoding))
    with monkeypatch.context() as patch:
        patch.setattr(CachedNorms, "held", lambda self: torch.no_grad())
        assert list(draw_steps(model, prompts, decoding)) == held
    # Twin: norms of other weights are seen, so those of one rollout must not serve the next.
    norms = CachedNorms(model)
    batch = collate([Example(torch.tensor(prompts[0]).numpy(), torch.ones(5).bool().numpy(), 0)], 0)
    with torch.no_grad(), norms.held():
        logits_at(model, batch, torch.arange(5))
    for name, parameter in model.named_parameters():
        if "magnitude" in name:
            parameter.data *= 2
    with torch.no_grad():
        fresh = logits_at(model, batch, torch.arange(5))
        with norms.held():
            assert not torch.equal(logits_at(model, batch, torch.arange(5)), fresh)
    assert not any("forward" in vars(module) for module in model.modules())
