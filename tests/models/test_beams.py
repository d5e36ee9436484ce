"""Beam search against transformers.generate, token by token."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from helpers.tiers import representatives
from helpers.zoo import ZOO
from surefoot.models import beams as beams_module
from surefoot.models.beams import Beam, beam_answers

NEW = 10
PROMPTS = [[5, 9, 17, 33], [7], [40, 41, 42, 43, 44, 45, 46, 47, 48], [60, 61]]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> model and tokenizer."""

    @cache
    def opened(family):
        folder = ZOO[family](tmp_path_factory.mktemp("beams") / family)
        return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    return opened


@pytest.fixture
def model(models):
    return models("llama3")


MANY = 200  # stop tokens, so that ways end at different steps


def stops_of(model, width: int) -> list[int]:
    """Tokens from all over the vocabulary."""
    size = model.config.get_text_config().vocab_size
    return list(range(3, size, size // width))[:width]


def reference(model, stops: list[int], beams: int, prompts=PROMPTS) -> list[list[int]]:
    """transformers' own answers, one prompt at a time: no padding, no batch."""
    config = GenerationConfig(
        num_beams=beams, do_sample=False, max_new_tokens=NEW, eos_token_id=stops, pad_token_id=stops[0]
    )
    model.generation_config = config
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def ours(model, stops: list[int], beams: int, prompts=PROMPTS) -> list[list[int]]:
    with torch.no_grad():
        found = beams_module._search(model, prompts, beams, NEW, frozenset(stops), stops[0])
    return [list(beam.tokens) for beam in found]


@pytest.mark.parametrize("family", representatives(ZOO, "llama3", "gemma2", "gpt2"))
def test_answers_are_those_of_transformers(models, family):
    model, _ = models(family)
    for beams, width in ((4, 1), (4, 3), (4, MANY), (1, 1)):
        stops = stops_of(model, width)
        expected = reference(model, stops, beams)
        assert ours(model, stops, beams) == expected
        if width == MANY:
            assert len({len(answer) for answer in expected}) > 1  # else nothing ended early


def test_twin_greedy_answers_are_others(model):
    stops = stops_of(model[0], 1)
    assert ours(model[0], stops, 4) != ours(model[0], stops, 1)


def test_twin_a_mean_over_all_positions_is_noticed(model, monkeypatch):
    """The length that a score is divided by decides which of several finished ways wins."""
    stops = stops_of(model[0], MANY)
    expected = reference(model[0], stops, 4)

    def sums(search, candidates, beams, stop_ids, *, last):
        parents = advance(search, candidates, beams, stop_ids, last=last)
        search.finished = [Beam(beam.tokens, beam.score / 10 ** len(beam.tokens)) for beam in search.finished]
        return parents

    advance = beams_module._advance
    monkeypatch.setattr(beams_module, "_advance", sums)
    assert ours(model[0], stops, 4) != expected


def test_settings_of_the_model_do_not_leak_in(model):
    stops = stops_of(model[0], 3)
    before = ours(model[0], stops, 4)
    model[0].generation_config = GenerationConfig(
        repetition_penalty=9.0, num_beams=2, do_sample=True, temperature=5.0, max_new_tokens=1, suppress_tokens=[1, 2]
    )
    assert ours(model[0], stops, 4) == before


def test_padding_changes_no_answer(model):
    stops = stops_of(model[0], 3)
    together = ours(model[0], stops, 4)
    alone = [ours(model[0], stops, 4, [prompt])[0] for prompt in PROMPTS]
    assert together == alone


def test_the_stop_token_is_no_part_of_the_text(model):
    stops = stops_of(model[0], MANY)
    answers = beam_answers(model[0], model[1], PROMPTS, beams=4, max_new_tokens=NEW, stop_ids=stops, pad_id=stops[0])
    assert any(answer.stopped for answer in answers)
    assert all(not set(answer.ids) & set(stops) for answer in answers)
    assert not model[0].training
