"""NEFTune against the formula by hand; off in evaluation; the same draws again; nothing left behind."""

import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers.plans import adapter_plan, linear_names
from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import Batch, Example, collate, pack
from surefoot.methods.losses.sft import sft_loss, with_neftune
from surefoot.models.adapters import add_adapter
from surefoot.models.checkpointing import enable_gradient_checkpointing
from surefoot.models.embeddings import embedding_noise, noisy_embeddings
from surefoot.models.fast.packing import packed_attention
from surefoot.models.forward import causal_model
from surefoot.models.modes import inference_mode
from surefoot.training.step import seed_micro_batch

ALPHA = 5.0
WIDTH = 32
# A sum of cross entropies over some twenty tokens, in fp32 by two ways.
FP32_LOSS = 1e-4
# Mean square of about 40 000 uniform draws: its standard error is 0.5 %.
SAMPLING = 0.03


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("base"), hidden=WIDTH)


@pytest.fixture
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).train()


def batch(lengths=(12, 5), side="right") -> Batch:
    draw = np.random.default_rng(0)
    return collate(
        [Example(draw.integers(0, 300, n), np.ones(n, dtype=bool), row) for row, n in enumerate(lengths)], 0, side
    )


def loss(model, batch, objective=None, micro_batch=0):
    seed_micro_batch(1, 2, micro_batch)
    return (objective or with_neftune(sft_loss, ALPHA))(model, batch).loss


def by_hand(model, batch):
    """The paper's formula, row by row, on embeddings handed to the model."""
    seed_micro_batch(1, 2, 0)
    embedded = model.get_input_embeddings()(batch.input_ids)
    draw = torch.empty(embedded.shape).uniform_(-1, 1)
    rows = [draw[row] * ALPHA / math.sqrt(length * WIDTH) for row, length in enumerate(batch.lengths)]
    logits = model(inputs_embeds=embedded + torch.stack(rows), attention_mask=batch.attention_mask).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def test_the_loss_is_that_of_the_formula(model):
    assert abs(loss(model, batch()) - by_hand(model, batch())) < FP32_LOSS
    assert abs(loss(model, batch(), sft_loss) - by_hand(model, batch())) > 100 * FP32_LOSS  # twin: without noise


def test_the_size_counts_real_tokens_of_each_example():
    lengths = (400, 100, 25)
    noise = embedding_noise(torch.zeros(3, 400, 100), ALPHA, lengths)
    for row, length in enumerate(lengths):
        limit = ALPHA / math.sqrt(length * 100)
        assert noise[row].abs().max() <= limit
        assert noise[row].square().mean() == pytest.approx(limit**2 / 3, rel=SAMPLING)


def test_the_same_micro_batch_gets_the_same_draws_and_another_one_others(model):
    first, again, other = (loss(model, batch(), micro_batch=number).item() for number in (0, 0, 1))
    assert first == again
    assert first != other


def test_a_longer_neighbor_does_not_make_the_noise_smaller():
    """It would with the padded length, as transformers' Trainer and TRL have it."""
    alone = embedding_noise(torch.zeros(1, 50, 200), ALPHA, (50,)).square().mean().item()
    beside, longer = embedding_noise(torch.zeros(2, 500, 200), ALPHA, (50, 500)).square().mean(dim=(1, 2)).tolist()
    assert beside == pytest.approx(alone, rel=SAMPLING)
    assert longer == pytest.approx(alone / 10, rel=SAMPLING)


def test_evaluation_has_none(model):
    model.eval()
    assert torch.equal(loss(model, batch()), loss(model, batch(), sft_loss))


def test_nothing_of_it_stays_on_the_model(model):
    before = set(model.state_dict())
    loss(model, batch())
    assert set(model.state_dict()) == before
    assert not model.get_input_embeddings()._forward_hooks
    with pytest.raises(RuntimeError, match="broken"):
        with_neftune(lambda *_: (_ for _ in ()).throw(RuntimeError("broken")), ALPHA)(model, batch())
    assert not model.get_input_embeddings()._forward_hooks


def gradients(model):
    model.zero_grad()
    loss(model, batch()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_adapters_learn_from_the_noisy_input(model, kind):
    adapted = add_adapter(model, adapter_plan(linear_names(model), kind), seed=1, base="base").train()
    assert abs(loss(adapted, batch()) - by_hand(causal_model(adapted), batch())) < FP32_LOSS
    assert gradients(adapted)


def test_recomputed_layers_see_the_same_noise(folder, model):
    wanted = gradients(model)
    other = AutoModelForCausalLM.from_pretrained(folder).train()
    enable_gradient_checkpointing(other)
    found = gradients(other)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_left_padding_too(model):
    assert torch.isfinite(loss(model, batch(side="left")))


def test_sixteen_bits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).train()
    assert embedding_noise(torch.zeros(1, 4, 8, dtype=torch.bfloat16), ALPHA, (4,)).dtype == torch.bfloat16
    assert torch.isfinite(loss(model, batch()))


def test_in_a_packed_row_each_document_has_the_size_of_its_own_length(model):
    lengths = (400, 100, 25)
    noise = embedding_noise(torch.zeros(1, sum(lengths), 100), ALPHA, lengths)
    for part, length in zip(noise[0].split(lengths), lengths, strict=True):
        limit = ALPHA / math.sqrt(length * 100)
        assert part.abs().max() <= limit
        assert part.square().mean().item() == pytest.approx(limit**2 / 3, rel=3 * SAMPLING)
    packed_attention("matmul").install(model)
    row = pack([Example(np.arange(length), np.ones(length, dtype=bool), length) for length in (30, 7)])
    quiet = loss(model, row, sft_loss)
    assert abs(loss(model, row) - quiet) > 100 * FP32_LOSS


def test_a_blank_batch_of_another_ranks_rows_is_computed_without(model):
    assert loss(model, batch().blank()) == loss(model, batch(), sft_loss)


def test_a_reference_in_the_same_model_gets_none(model):
    rows = batch()
    with noisy_embeddings(model, ALPHA, rows.lengths):
        noisy = model.get_input_embeddings()(rows.input_ids)
        with inference_mode(model):
            quiet = model.get_input_embeddings()(rows.input_ids)
    assert torch.equal(quiet, model.get_input_embeddings()(rows.input_ids))
    assert not torch.equal(quiet, noisy)
