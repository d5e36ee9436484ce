"""The cache with room: what transformers' own gives, for every family, however rows come and go."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer

from helpers import zoo
from helpers.tiers import representatives
from helpers.zoo_modern import MODERN
from surefoot.models import kv_cache as kv_cache_module
from surefoot.models.forward import causal_model
from surefoot.models.generate import next_logits
from surefoot.models.kv_cache import PreallocatedLayer, decoding_cache

STEPS = 40  # beyond the zoo's windows of 16, and beyond the first room
STATE_LOGITS = 2e-5  # states are added up in another order: 2e-6 was seen
LOGITS = 5e-6  # attention reads the same numbers at other strides: at most some ulps of logits up to 10 (1e-6)


@pytest.fixture
def little_room(monkeypatch):
    """So little that it runs out every few tokens."""
    monkeypatch.setattr(kv_cache_module, "_LEAST", 3)


def decoded(model, cache, *, drop_at=()) -> list[torch.Tensor]:
    """Logits of every step; the second row is padded. drop_at: steps before which the first row leaves."""
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 9, 4], [3, 1, 4, 9]])
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 1]])
    found = []
    for step in range(STEPS):
        if step in drop_at:
            kept = torch.arange(1, len(ids))
            cache.reorder_cache(kept)
            ids, mask = ids[kept], mask[kept]
        found.append(next_logits(model, ids, mask, cache))
        ids = torch.full((len(ids), 1), step % 50)
        mask = torch.cat((mask, torch.ones_like(ids)), dim=1)
    return found


def opened(folder, attention=None):
    """attention: None is SDPA where the family has it."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()


@pytest.mark.parametrize("family", zoo.ZOO)
def test_logits_are_those_of_the_joined_cache(zoo_model, family, little_room):
    model = opened(zoo_model(family))
    own = decoded(model, decoding_cache(model), drop_at=(7, 25))
    plain = decoded(model, DynamicCache(config=causal_model(model).config), drop_at=(7, 25))
    for one, other in zip(own, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=LOGITS)


def test_eager_attention_reads_it_too(zoo_model, little_room):
    model = opened(zoo_model("llama3"), "eager")
    plain = decoded(model, DynamicCache(config=causal_model(model).config), drop_at=(7, 25))
    for one, other in zip(decoded(model, decoding_cache(model), drop_at=(7, 25)), plain, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=LOGITS)


def test_twin_a_room_that_loses_its_tokens_is_noticed(zoo_model, little_room, monkeypatch):
    """A room that grows without taking along what it held."""
    model = opened(zoo_model("llama3"))
    plain = decoded(model, decoding_cache(model))
    update = PreallocatedLayer.update

    def forgetful(layer, keys, values, *arguments, **keywords):
        found = update(layer, keys, values, *arguments, **keywords)
        if found[0].shape[-2] == 10:
            found[0][..., :5, :] = 0
        return found

    monkeypatch.setattr(PreallocatedLayer, "update", forgetful)
    changed = decoded(model, decoding_cache(model))
    assert all(torch.equal(one, other) for one, other in zip(changed[:6], plain[:6], strict=True))
    assert not torch.allclose(changed[-1], plain[-1], atol=LOGITS)


def test_windows_keep_their_own_layers(zoo_model):
    model = opened(zoo_model("gemma2"))
    own = [type(layer) for layer in decoding_cache(model).layers]
    plain = [type(layer) for layer in DynamicCache(config=model.config).layers]
    assert PreallocatedLayer in own
    assert len(set(own)) == 2
    assert own == [PreallocatedLayer if kind is DynamicLayer else kind for kind in plain]


def steps(cache: DynamicLayer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What attention gets, through everything that can be done to a cache's rows and columns. Keys and values differ
    in size, as in multi-head latent attention."""
    generator = torch.Generator().manual_seed(0)

    def feed(rows: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = (torch.randn(rows, 2, tokens, size, generator=generator) for size in (4, 6))
        keys, values = cache.update(keys, values)
        return keys.clone(), values.clone()

    yield feed(3, 5)
    yield feed(3, 1)
    cache.reorder_cache(torch.LongTensor([2, 0, 0]))  # beams
    yield feed(3, 1)
    cache.batch_select_indices(torch.tensor([0, 2]))
    yield feed(2, 40)
    cache.crop(-30)
    yield feed(2, 2)
    cache.batch_repeat_interleave(2)
    yield feed(4, 1)
    cache.reset()
    yield feed(1, 3)


def test_a_layer_gives_what_it_was_given(monkeypatch):
    for one, other in zip(steps(PreallocatedLayer()), steps(DynamicLayer()), strict=True):
        assert all(map(torch.equal, one, other))
    monkeypatch.setattr(PreallocatedLayer, "_is_in", lambda layer, room: True)  # twin: reordered rows in the old room
    pairs = islice(zip(steps(PreallocatedLayer()), steps(DynamicLayer()), strict=True), 3)
    assert [all(map(torch.equal, *pair)) for pair in pairs] == [True, True, False]


def test_a_token_is_written_where_there_is_room():
    layer = PreallocatedLayer()
    first, _ = layer.update(torch.ones(1, 1, 4, 2), torch.ones(1, 1, 4, 2))
    second, _ = layer.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2))
    assert second.data_ptr() == first.data_ptr()
    assert layer.get_seq_length() == 5


STATES = ("mamba", "mamba2", "falcon_mamba", "recurrent_gemma")  # take their cache by another name, or take none


def whole(model, *, drop_at=()) -> list[torch.Tensor]:
    """As `decoded`, from whole rows without padding."""
    rows, found = [[5, 6, 7, 8], [9, 4], [3, 1, 4, 9]], []
    for step in range(STEPS):
        rows = rows[1:] if step in drop_at else rows
        with torch.no_grad():
            found.append(torch.stack([model(torch.tensor([row]), use_cache=False).logits[0, -1] for row in rows]))
        rows = [[*row, step % 50] for row in rows]
    return found


@pytest.mark.parametrize("kind", representatives(STATES, "mamba", "recurrent_gemma"))
def test_models_with_states_generate_as_they_read_whole_rows(kind, tmp_path):
    model = opened(MODERN[kind](tmp_path))
    expected = whole(model, drop_at=(7, 25))
    for _ in range(2):  # nothing is left of the first time
        own = decoded(model, decoding_cache(model), drop_at=(7, 25))
        for one, other in zip(own, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=STATE_LOGITS)


def test_twins_another_name_or_a_mask_of_all_tokens_are_other_logits(tmp_path, monkeypatch):
    model = opened(MODERN["mamba"](tmp_path))
    expected = whole(model)[-1]
    for name, broken in (("_cache_argument", lambda model: "past_key_values"), ("_OF_STATES", "")):
        with monkeypatch.context() as only:
            only.setattr(kv_cache_module, name, broken)
            assert (decoded(model, decoding_cache(model))[-1] - expected).abs().max() > 100 * STATE_LOGITS
