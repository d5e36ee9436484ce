"""Generation: transformers' own tokens, whatever else is in the batch, and no trace in training."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TopKLogitsWarper, TopPLogitsWarper

from helpers.plans import adapter_plan, attention_plan, linear_names
from surefoot.models import generate
from surefoot.models.adapters import add_adapter
from surefoot.models.attention import attention_context
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.generate import Decoding, draw_tokens, generate_answers, stream_text

PROMPTS = [[320, 7, 9, 200, 33], [320, 41], [320, *range(50, 75)]]
STEPS = 24
EOS = 321
LOG_PROBABILITY = 4e-6  # fp32 sums of 40 terms, of logits up to 15: a few ulps of those (1e-6)


@pytest.fixture(scope="module")
def folder(tiny_model):
    return tiny_model(hidden=64)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def model(folder):
    """Weights ten times their usual size, so that first choices are clear and answers vary."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data *= 10
    return model


def answers(model, tokenizer, prompts=PROMPTS, **options):
    options = {"max_new_tokens": STEPS, "stop_ids": (EOS,), "pad_id": EOS} | options
    return generate_answers(model, tokenizer, prompts, **options)


def test_greedy_tokens_are_those_of_transformers(model, tokenizer):
    for prompt, answer in zip(PROMPTS, answers(model, tokenizer), strict=True):
        own = model.generate(torch.tensor([prompt]), max_new_tokens=STEPS, do_sample=False, pad_token_id=EOS)
        assert list(answer.ids) == [token for token in own[0, len(prompt) :].tolist() if token != EOS]
        assert answer.text == tokenizer.decode(answer.ids, skip_special_tokens=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_gives_what_each_prompt_gives_alone(model, tokenizer, temperature, monkeypatch):
    options = {"temperature": temperature, "seed": 5}
    together = answers(model, tokenizer, **options)
    first = answers(model, tokenizer, PROMPTS[:1], **options)
    assert together[:1] == first
    assert len({answer.ids for answer in together}) == len(PROMPTS)
    if temperature == 0:
        alone = [answers(model, tokenizer, [prompt], **options)[0] for prompt in PROMPTS]
        assert together == alone
        monkeypatch.setattr(generate, "positions_from_mask", lambda mask: torch.zeros_like(mask))  # twin
        assert answers(model, tokenizer, **options) != alone


def test_a_stop_token_ends_its_own_answer_only(model, tokenizer):
    plain = answers(model, tokenizer)
    stop = plain[0].ids[5]
    place = plain[0].ids.index(stop)
    stopped = answers(model, tokenizer, stop_ids=(EOS, stop))
    assert stopped[0].stopped
    assert stopped[0].ids == plain[0].ids[:place]
    for before, after in zip(plain[1:], stopped[1:], strict=True):
        assert after.ids == before.ids[: len(after.ids)]
    assert not plain[0].stopped
    assert len(plain[0].ids) == STEPS


def test_training_is_left_as_it_was(model, tokenizer):
    model = add_adapter(model, adapter_plan(linear_names(model), dropout=0.5), seed=1, base="base").train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.05
    enable_gradient_checkpointing(model)
    state = torch.get_rng_state()
    with attention_context(attention_plan("sdpa", ("flash",))):  # generation needs masks; training's kernels may not
        first, second = (answers(model, tokenizer, temperature=0.8) for _ in range(2))
    assert first == second  # dropout is off, and the draw is the seed's
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())
    assert torch.is_grad_enabled()
    assert answers(model, tokenizer, temperature=0.8, seed=1) != first
    model.eval()
    assert answers(model, tokenizer, temperature=0.8) == first
    assert not model.training


def test_an_error_restores_training_mode(model, tokenizer):
    model.train()
    with pytest.raises(ValueError, match="token"):
        answers(model, tokenizer, [[320], []])
    assert model.training


def sample(logits: torch.Tensor, top_p: float, draw: float) -> int:
    return int(draw_tokens(logits[None], 1.0, top_p, [draw])[0])


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64).log()
    places = torch.linspace(0, 1 - 1e-9, 1001, dtype=torch.float64).tolist()
    counts = torch.bincount(torch.tensor([sample(logits, 1.0, draw) for draw in places]), minlength=3) / 1001
    assert torch.allclose(counts, torch.tensor([0.5, 0.2, 0.3]), atol=2e-3)  # the grid's own step is 1e-3
    kept = {sample(logits, 0.7, draw) for draw in places}
    assert kept == {0, 2}  # 0.5 alone does not reach 0.7, with 0.3 it does
    assert {sample(logits, 0.0, draw) for draw in places} == {0}
    for top_p in (0.5, 0.7, 1.0):
        allowed = torch.tensor([sample(logits, top_p, draw) for draw in places]).unique().tolist()
        warped = TopPLogitsWarper(top_p)(torch.zeros(1, 1), logits[None]) if top_p < 1 else logits[None]
        assert allowed == warped[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_log_probabilities_are_those_of_the_tempered_distribution(top_p):
    logits = 3 * torch.randn(5, 40, generator=torch.Generator().manual_seed(2))
    tokens, logprobs, _ = draw_tokens(logits, 0.7, top_p, [0.0, 0.3, 0.5, 0.9, 1 - 2**-53])
    expected = (logits.double() / 0.7).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert torch.allclose(logprobs.double(), expected, rtol=0, atol=LOG_PROBABILITY)
    untempered = logits.double().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    assert not torch.allclose(logprobs.double(), untempered, rtol=0, atol=LOG_PROBABILITY)  # twin: no temperature
    first, likely, _ = draw_tokens(logits, 0.0, top_p, [0.0] * 5)
    assert torch.equal(first, logits.argmax(-1))
    assert torch.allclose(likely, logits.log_softmax(-1).amax(-1), rtol=0, atol=LOG_PROBABILITY)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.6), (4, 0.7), (99, 0.9), (1, 1.0)])
def test_what_could_be_drawn_is_what_transformers_leaves(top_k, top_p):
    logits = 2 * torch.randn(6, 40, generator=torch.Generator().manual_seed(3))
    _, _, cut = draw_tokens(logits, 1.0, top_p, [0.5] * 6, top_k)
    warped = TopKLogitsWarper(top_k)(torch.zeros(1, 1), logits) if top_k else logits
    warped = TopPLogitsWarper(top_p)(torch.zeros(1, 1), warped) if top_p < 1 else warped
    left = [row.isfinite().nonzero().flatten().tolist() for row in warped]
    assert [sorted(row) for row in cut.tokens(range(6))] == left
    share = torch.stack([row.softmax(0)[kept].sum() for row, kept in zip(logits.double(), left, strict=True)]).log()
    assert torch.allclose(cut.share.double(), share, rtol=0, atol=LOG_PROBABILITY)
    draws = torch.linspace(0, 1 - 1e-9, 99).tolist()
    drawn = {int(draw_tokens(logits[:1], 1.0, top_p, [draw], top_k)[0]) for draw in draws}
    assert drawn <= set(left[0])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_token_that_is_never_drawn_leaves_the_others_their_probabilities(temperature):
    logits = torch.tensor([[0.5, 3.0, 0.0, 1.0]]).expand(200, 4)
    draws = [place / 200 for place in range(200)]
    tokens, logprobs, _ = draw_tokens(logits, temperature, 1.0, draws, never=(1, 4))  # of 4 there is no logit
    free, _, _ = draw_tokens(logits, temperature, 1.0, draws)
    assert set(tokens.tolist()) == ({3} if temperature == 0 else {0, 2, 3})
    assert 1 in free.tolist()  # twin
    assert torch.equal(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1))


def test_pieces_of_a_stream_are_whole_characters(tokenizer, monkeypatch):
    text = "a trout — 🐟 é"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) > len(text)  # some characters take several tokens
    steps = [[token] for token in [*ids, EOS, 7]]
    monkeypatch.setattr(generate, "decode", lambda *_: iter(steps))
    pieces = list(stream_text(None, tokenizer, [320], Decoding(99, (EOS,), EOS)))
    assert "".join(pieces) == text
    assert "🐟" in pieces
    assert not any("\ufffd" in piece for piece in pieces)
    monkeypatch.setattr(generate, "_INCOMPLETE", "nothing")  # twin: half characters would be shown
    assert any("\ufffd" in piece for piece in stream_text(None, tokenizer, [320], Decoding(99, (EOS,), EOS)))
