"""Added rows are deterministic, harmless at step 0, and leave everything else as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from surefoot.models import embeddings as vocabulary
from surefoot.models.embeddings import embedding_and_head, is_tied, resize_vocabulary


@pytest.fixture(scope="module")
def folders(tiny_model) -> dict[bool, Path]:
    return {tied: tiny_model(tied=tied) for tied in (True, False)}


def opened(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_and_the_others_keep_their_bits(folders, tied):
    before, after = opened(folders[tied]), opened(folders[tied])
    rows = before.config.vocab_size
    resize_vocabulary(after, rows + 3)
    assert is_tied(after) == tied
    assert after.config.vocab_size == rows + 3
    for old, new in zip(embedding_and_head(before), embedding_and_head(after), strict=True):
        assert torch.equal(new[:rows], old)
        assert torch.equal(new[rows:], old.double().mean(0).float().expand(3, -1))
    ids = torch.arange(12)[None]
    assert torch.equal(after(input_ids=ids).logits[..., :rows], before(input_ids=ids).logits)


def test_the_random_state_is_not_touched(folders, monkeypatch):
    model = opened(folders[False])
    state = torch.get_rng_state()
    resize_vocabulary(model, model.config.vocab_size + 1)
    assert torch.equal(torch.get_rng_state(), state)
    monkeypatch.setattr(vocabulary.torch.random, "fork_rng", lambda devices: torch.no_grad())  # twin: no fork
    resize_vocabulary(model, model.config.vocab_size + 1)
    assert not torch.equal(torch.get_rng_state(), state)


def test_a_resized_tied_model_is_still_tied_after_saving(folders, tmp_path):
    model = opened(folders[True])
    resize_vocabulary(model, model.config.vocab_size + 2)
    model.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert is_tied(again)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_rows_are_never_dropped(folders):
    model = opened(folders[False])
    with pytest.raises(ValueError, match="would drop"):
        resize_vocabulary(model, model.config.vocab_size - 1)
    resize_vocabulary(model, model.config.vocab_size)  # nothing to do


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_tokens_are_drawn_as_transformers_does_and_pads_is_the_mean(folders, tied):
    ours, theirs, other = (opened(folders[tied]) for _ in range(3))
    rows = ours.config.vocab_size
    resize_vocabulary(ours, rows + 3, drawn=rows + 2, seed=7)
    torch.manual_seed(7)
    theirs.resize_token_embeddings(rows + 2)
    for mine, own in zip(embedding_and_head(ours), embedding_and_head(theirs), strict=True):
        assert torch.equal(mine[:-1], own)
        assert not torch.equal(mine[rows], mine[rows + 1])
        assert torch.equal(mine[-1], own.double().mean(0).float())
    resize_vocabulary(other, rows + 3, drawn=rows + 2, seed=8)  # twin
    assert not torch.equal(embedding_and_head(other)[0], embedding_and_head(ours)[0])
