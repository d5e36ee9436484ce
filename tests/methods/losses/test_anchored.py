"""ASFT: LLaMA-Factory's formula in float64, with its gradients, on logits, on a chunked head and on whole models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers.tiny_models import tiny_llama
from methods.losses.test_token_losses import FP32, FP64, dft, examples, gradients, relative
from surefoot.data.batching.batch import collate, pack
from surefoot.kernels.chunked_loss import Head, summed, summed_over
from surefoot.kernels.divergence import Anchored, Whole
from surefoot.methods.losses.anchored import anchored_loss, distributions
from surefoot.methods.losses.sft import Constants, sft_loss
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.packing import packed_attention

KL = 0.7
CONSTANTS = Constants(kl=KL)
ROWS, WIDTH, WORDS = 37, 24, 90


def asft(logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor, kl: float) -> torch.Tensor:
    """As LLaMA-Factory's _asft_cross_entropy, before its mean: torch's kl_div takes log p first, then q."""
    pulled = F.kl_div(logits.log_softmax(-1), reference.softmax(-1), reduction="none").sum(-1)
    return dft(logits, targets) + kl * pulled


def turned(logits: torch.Tensor, targets: torch.Tensor, reference: torch.Tensor, kl: float) -> torch.Tensor:
    """The twin: KL(p, q)."""
    pulled = F.kl_div(reference.log_softmax(-1), logits.softmax(-1), reduction="none").sum(-1)
    return dft(logits, targets) + kl * pulled


@pytest.mark.parametrize("rows", [5, 64])
@pytest.mark.parametrize("apart", [True, False])
def test_of_the_head_in_float64(apart, rows):
    draw = torch.Generator().manual_seed(0)
    hidden, own = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_()
        for shape in ((ROWS, WIDTH), (WORDS, WIDTH))
    )
    targets = torch.randint(0, WORDS, (ROWS,), generator=draw)
    reference = torch.randn(ROWS, WORDS, generator=draw, dtype=torch.float64)
    loss = Anchored(Whole(None, None, reference, WORDS), targets, weight=lambda at, log_p: log_p.exp(), kl=KL)
    if apart:
        found = summed(hidden, Head(own, None, rows), loss)
    else:
        found = summed_over(F.linear(hidden, own), loss, rows)
    logits = F.linear(hidden, own)
    wanted, twin = (formula(logits, targets, reference, KL).sum() for formula in (asft, turned))
    ours, theirs, others = (
        torch.autograd.grad(one * 7, (hidden, own), retain_graph=True) for one in (found, wanted, twin)
    )
    assert relative(found.detach(), wanted.detach()) <= FP64
    assert (
        relative(loss.divergence.sum(), (asft(logits, targets, reference, 1.0) - dft(logits, targets)).sum().detach())
        <= FP32
    )
    assert max(map(relative, ours, theirs)) <= FP64
    assert min(map(relative, others, theirs)) > 0.1


@pytest.mark.parametrize(("chunked", "packed"), [(False, False), (True, True)])
def test_of_a_model(tmp_path, chunked, packed):
    folder = tiny_llama(tmp_path / "m")
    before = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    with torch.no_grad():
        before.lm_head.weight *= 20  # else every token is about as likely, and the weights are about equal
    model = copy.deepcopy(before).train()
    with torch.no_grad():
        for one in model.parameters():
            one += 0.3 * one.std() * torch.randn(one.shape, generator=torch.Generator().manual_seed(1))
    exact, was = copy.deepcopy(model).double(), copy.deepcopy(before).double()
    wanted = []
    for one in examples():
        ids, learned = torch.tensor(one.ids)[None], torch.tensor(one.supervised)[1:]
        with torch.no_grad():
            reference = was(input_ids=ids).logits[0, :-1][learned]
        wanted.append(asft(exact(input_ids=ids).logits[0, :-1][learned], ids[0, 1:][learned], reference, KL))
    for one in (model, before):
        if packed:
            packed_attention("sdpa").install(one)
        if chunked:
            loss_path(rows=8).install(one)
    batch = pack(examples()) if packed else collate(examples(), pad_id=0)
    objective = anchored_loss("asft", CONSTANTS, distributions(before))
    out = objective(model, batch)
    found, mean = out.loss / batch.weight, torch.cat(wanted).mean()
    assert relative(found.detach(), mean.detach()) <= FP32
    ours, theirs = gradients(model, found), gradients(exact, mean)
    assert max(relative(ours[name], theirs[name]) for name in ours) <= FP32
    plain = anchored_loss("asft", CONSTANTS, distributions(model))(model, batch)  # twin: held near itself
    assert float(plain.sums["divergence"]) == 0
    assert relative(plain.loss.detach() / batch.weight, mean.detach()) > 0.05
    with torch.no_grad():  # evaluations report the cross entropy
        assert torch.equal(objective(model, batch).loss, sft_loss(model, batch).loss)
