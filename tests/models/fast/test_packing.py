"""Packed rows in every family: the loss and gradients of padded ones, and no document hears of another."""

from __future__ import annotations

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from helpers import stand_in_kernels
from helpers.architectures import TINY, build
from helpers.faults import raises_fault
from helpers.tiers import diagonal, representatives
from surefoot.data.batching.batch import Example, collate, pack, unpacked
from surefoot.kernels import packed_attention as kernels
from surefoot.methods.losses.sft import sft_loss
from surefoot.models import forward as documents
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.embeddings import embedding_noise, noisy_embeddings
from surefoot.models.fast.packing import documents_fault, obstacle, packed_attention
from surefoot.models.forward import hidden_states
from surefoot.system.hardware import ATTENTION_PACKAGES

# The same fp32 sums in another order: 6e-8 per operation, over a few hundred operations in these tiny models.
FP32_RELATIVE = 1e-5
# A window of 16 tokens in some families: every document is shorter.
LENGTHS = (14, 3, 9, 16, 1, 6)
FAMILIES = sorted(set(TINY) - {"gemma2"})  # Gemma 2 caps its logits, and has no SDPA


def model_of(family: str):
    """In training mode without dropout, its weights away from zeros and ones."""
    torch.manual_seed(0)
    off = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0} if family == "gpt2" else {}
    off = {"dropout": 0.0} if family == "opt" else off
    model = build(TINY[family] | off, device="cpu", attn_implementation="eager" if family == "gemma2" else "sdpa")
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.train()


def examples(lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(3, 70, length), np.arange(length) >= length // 3, n) for n, length in enumerate(lengths)
    ]


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = sft_loss(model, batch).loss
    loss.backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


def largest_difference(one, two) -> float:
    """Share of the norm, over loss and gradients."""
    (loss, found), (other_loss, other) = one, two
    assert found.keys() == other.keys()
    whole = max(float(gradient.norm()) for gradient in other.values())
    shares = [float((found[name] - other[name]).norm()) / whole for name in found]
    return max(*shares, abs(float(loss - other_loss)) / float(other_loss))


@pytest.mark.parametrize(("family", "form"), diagonal(FAMILIES, ["matmul", "sdpa"]))
def test_a_packed_row_is_what_padded_rows_are(family, form):
    model = model_of(family)
    padded = loss_and_gradients(model, collate(examples(), 0))
    undo = packed_attention(form).install(model)
    packed = loss_and_gradients(model, pack(examples()))
    assert largest_difference(packed, padded) < FP32_RELATIVE
    # Rows that are not packed, and generation with its mask, go on as before.
    assert largest_difference(loss_and_gradients(model, collate(examples(), 0)), padded) < FP32_RELATIVE
    assert largest_difference(loss_and_gradients(model, collate(examples(), 0, "left")), padded) < FP32_RELATIVE
    undo()
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
        sft_loss(model, pack(examples()))


@pytest.mark.parametrize("form", ATTENTION_PACKAGES)
def test_a_packages_kernel_runs_in_transformers_model(tmp_path, monkeypatch, form):
    """transformers takes names with "flash" in them for its own."""
    monkeypatch.syspath_prepend(stand_in_kernels.install(form, tmp_path, "right"))
    model = model_of("llama")
    padded = loss_and_gradients(model, collate(examples(), 0))
    packed_attention(form).install(model)
    try:
        assert largest_difference(loss_and_gradients(model, pack(examples())), padded) < FP32_RELATIVE
    finally:
        for name in [name for name in sys.modules if name.startswith("flash_attn")]:
            del sys.modules[name]


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_checkpointed_layers_see_the_documents_again(family):
    model = model_of(family)
    padded = loss_and_gradients(model, collate(examples(), 0))
    enable_gradient_checkpointing(model)
    packed_attention("matmul").install(model)
    assert largest_difference(loss_and_gradients(model, pack(examples())), padded) < FP32_RELATIVE


def moved(model, batch, other):
    """Of each document how far its hidden states move when the batch is another one."""
    with torch.no_grad():
        one, two = (hidden_states(model, rows)[0].split(batch.documents) for rows in (batch, other))
    return [float((a - b).abs().max()) for a, b in zip(one, two, strict=True)]


def with_another_second(batch):
    ids = batch.input_ids.clone()
    begin = batch.documents[0]
    ids[0, begin : begin + batch.documents[1]] += 1
    return replace(batch, input_ids=ids)


@pytest.mark.parametrize(("family", "form"), diagonal(FAMILIES, ["matmul", "sdpa"]))
def test_what_one_document_says_moves_no_other(family, form):
    model = model_of(family).eval()
    packed_attention(form).install(model)
    batch = pack(examples())
    changes = moved(model, batch, with_another_second(batch))
    assert changes[1] > 0
    assert [change for place, change in enumerate(changes) if place != 1] == [0.0] * (len(LENGTHS) - 1)


MORE = 40  # tokens, more than any document has, and than a window of 16


@pytest.fixture
def filled(monkeypatch):
    """Rows end with filling in fp32, too."""
    monkeypatch.setattr("surefoot.models.forward.round_up_rows", lambda rows, dtype, device: rows + MORE)


def tokens_seen(model, batch):
    """How many the embeddings are asked for, and the hidden states."""
    seen = []
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: seen.append(output.shape[1])
    )
    hidden = hidden_states(model, batch)
    hook.remove()
    return seen, hidden


@pytest.mark.parametrize("family", FAMILIES)
def test_what_fills_a_row_up_changes_nothing(family, filled):
    model = model_of(family)
    padded = loss_and_gradients(model, collate(examples(), 0))
    packed_attention("matmul").install(model)
    assert largest_difference(loss_and_gradients(model, pack(examples())), padded) < FP32_RELATIVE
    seen, hidden = tokens_seen(model, pack(examples()))
    assert seen == [sum(LENGTHS) + MORE]
    assert hidden.shape[1] == sum(LENGTHS)


def test_noise_on_embeddings_is_that_of_the_row_without_filling(filled):
    """Of the documents; filling has none."""
    model, batch = model_of("llama"), pack(examples())
    packed_attention("matmul").install(model)
    with noisy_embeddings(model, 5.0, batch.documents):
        _, hidden = tokens_seen(model, batch)
    assert hidden.isfinite().all()
    noise = embedding_noise(torch.zeros(1, sum(LENGTHS) + MORE, 8), 5.0, LENGTHS)
    assert noise[:, : sum(LENGTHS)].abs().max() > 0
    assert not noise[:, sum(LENGTHS) :].any()


def test_twin_filling_longer_than_the_documents_is_more_than_a_window_sees(monkeypatch):
    monkeypatch.setattr("surefoot.models.forward._filling", lambda model, batch: [MORE])
    model = model_of("mistral")
    packed_attention("matmul").install(model)
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing", MORE):
        hidden_states(model, pack(examples()))


def test_16_bit_rows_share_their_number_of_tokens():
    model = model_of("llama").bfloat16()
    packed_attention("matmul").install(model)
    rows = [pack(examples((14, 16, 9, last))) for last in (9, 12, 16)]
    assert {tokens_seen(model, row)[0][0] for row in rows} == {48, 56}


def test_twin_that_leaks(monkeypatch):
    def one_document(q, k, v, found, scale):
        return kernels.sdpa(q, k, v, kernels.documents_of([q.shape[2]], q.device), scale)

    monkeypatch.setitem(documents.FORMS, "matmul", one_document)
    model = model_of("llama").eval()
    packed_attention("matmul").install(model)
    batch = pack(examples())
    changes = moved(model, batch, with_another_second(batch))
    assert changes[0] == 0  # it is causal
    assert min(changes[1:]) > 0  # and all that follow hear of it
    model.train()
    found = loss_and_gradients(model, batch), loss_and_gradients(model, unpacked(batch, 0))
    assert largest_difference(*found) > 100 * FP32_RELATIVE


def test_positions_begin_anew(monkeypatch):
    monkeypatch.setattr(
        "surefoot.models.forward.position_ids", lambda lengths, device: torch.arange(sum(lengths))[None]
    )
    model = model_of("gpt2")
    packed_attention("matmul").install(model)
    found = loss_and_gradients(model, pack(examples())), loss_and_gradients(model, collate(examples(), 0))
    assert largest_difference(*found) > 100 * FP32_RELATIVE  # twin of the tests above


def test_autocast_gives_the_products_what_it_gives_sdpa():
    model = model_of("llama")
    found = []
    for install, batch in ((False, collate(examples(), 0)), (True, pack(examples()))):
        if install:
            packed_attention("matmul").install(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss = sft_loss(model, batch).loss
        loss.backward()
        found.append(float(loss.detach()))
    assert found[1] == pytest.approx(found[0], rel=1e-2)  # bf16 has 8 bits


def test_a_window_shorter_than_a_document_is_no_matter_of_rounding():
    model = model_of("mistral")
    packed_attention("matmul").install(model)
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing", 17, 16):
        sft_loss(model, pack(examples((17, 3))))


def test_dropout_in_attention_is_refused():
    model = model_of("llama")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    packed_attention("matmul").install(model)
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
        sft_loss(model, pack(examples()))


def test_a_family_that_loses_the_documents_is_told():
    model = model_of("llama")
    packed_attention("matmul").install(model)
    attend = model.model.layers[1].self_attn
    plain = attend.forward
    attend.forward = lambda *args, **kwargs: plain(*args, **{k: v for k, v in kwargs.items() if k != "documents"})
    with raises_fault("SF-CONFIG-CONFLICT", "data.packing"):
        sft_loss(model, pack(examples()))


def test_obstacles_have_names():
    assert obstacle(model_of("llama")) == ""
    assert "caps logits" in obstacle(model_of("gemma2"))
    eager = build(TINY["llama"], device="cpu", attn_implementation="eager")
    assert "eager" in packed_attention("matmul").obstacle(eager)


def test_the_saved_config_knows_nothing_of_it(tmp_path):
    model = model_of("llama")
    packed_attention("matmul").install(model)
    model.save_pretrained(tmp_path)
    assert "surefoot" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("family", representatives(FAMILIES, "llama", "gpt2", "opt"))
def test_a_whole_model_is_tried_with_two_short_documents_and_left_as_it_was(family, monkeypatch):
    model = model_of(family)
    attention = model.config._attn_implementation
    assert documents_fault(model) == obstacle(model) == ""

    def one_document(q, k, v, found, scale):
        return kernels.sdpa(q, k, v, kernels.documents_of([q.shape[2]], q.device), scale)

    def lost(*_):
        raise documents._lost("dropped")

    for broken, why in ((one_document, r"\d"), (lost, "dropped")):  # twins; the first by how much another changed
        monkeypatch.setitem(documents.FORMS, "sdpa", broken)
        assert re.search(why, documents_fault(model))
    assert model.config._attn_implementation == attention
    assert model.training
