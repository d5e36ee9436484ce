"""Weights of tokens in the loss: the formulas of TRL, LLaMA-Factory and Axolotl in float64, with their gradients."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from helpers.tiny_models import tiny_llama
from surefoot.data.batching.batch import IGNORE, Example, collate, pack
from surefoot.kernels.chunked_loss import Head, summed_loss
from surefoot.methods.losses.sft import LOSSES, Constants, sft_loss, token_loss
from surefoot.models.fast.chunked_head import loss_path
from surefoot.models.fast.packing import packed_attention

FP64 = 1e-11  # sums of some hundred float64 numbers in another order, and an exp of a log
FP32 = 2e-5  # the same in fp32, through two layers
BF16 = 2e-2  # 8 bits, averaged over some tens of tokens


def dft(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As TRL's SFTTrainer, LLaMA-Factory and ms-swift: each loss times its own probability, which is detached."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses * torch.exp(-losses).detach()


def eaft(logits: torch.Tensor, targets: torch.Tensor, alpha: float, k: int, divisor: float) -> torch.Tensor:
    """As LLaMA-Factory (k 20, divisor 3) and Axolotl (no divisor): entropy of a softmax over the k largest logits."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        largest = torch.topk(logits, k=k, dim=-1).values
        log_p = largest - torch.logsumexp(largest, dim=-1, keepdim=True)
        weights = torch.pow(-(log_p.exp() * log_p).sum(dim=-1) / divisor, alpha)
    return losses * weights


CASES = {
    "dft": ("dft", Constants(), dft),
    "eaft": ("eaft", Constants(), partial(eaft, alpha=1.0, k=20, divisor=3.0)),
    "axolotl": ("eaft", Constants(alpha=1.5, top=7, entropy=1.0), partial(eaft, alpha=1.5, k=7, divisor=1.0)),
}


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rows", [5, 64])
@pytest.mark.parametrize("bias", [True, False])
def test_of_the_head_in_float64(case, rows, bias):
    name, constants, formula = CASES[case]
    draw = torch.Generator().manual_seed(0)
    shapes = ((37, 24), (90, 24), (90,))
    hidden, weight, shift = (torch.randn(*one, generator=draw, dtype=torch.float64).requires_grad_() for one in shapes)
    targets = torch.randint(0, 90, (37,), generator=draw)
    inputs = [hidden, weight, *([shift] if bias else [])]
    head = Head(weight, shift if bias else None, rows)
    wanted = formula(F.linear(hidden, weight, head.bias), targets).sum()
    found = summed_loss(hidden, head, targets, LOSSES[name](constants))
    plain = summed_loss(hidden, head, targets)  # twin
    gradients = [torch.autograd.grad(one * 7, inputs) for one in (found, wanted, plain)]
    assert relative(found.detach(), wanted.detach()) <= FP64
    assert max(map(relative, gradients[0], gradients[1])) <= FP64
    assert min(map(relative, gradients[2], gradients[1])) > 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tokens") / "m")


def examples() -> list[Example]:
    rng = np.random.default_rng(0)
    return [
        Example(rng.integers(1, 300, length), np.arange(length) >= length // 3, number)
        for number, length in enumerate((9, 23, 17, 5))
    ]


def by_formula(model, formula) -> torch.Tensor:
    """The mean over the learned tokens, of logits one example at a time."""
    losses = []
    for one in examples():
        ids = torch.tensor(one.ids)[None]
        learned = torch.tensor(one.supervised)[1:]
        losses.append(formula(model(input_ids=ids).logits[0, :-1][learned], ids[0, 1:][learned]))
    return torch.cat(losses).mean()


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: one.grad.clone() for name, one in model.named_parameters()}


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_of_a_model(folder, case, chunked, packed):
    name, constants, formula = CASES[case]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    with torch.no_grad():
        model.lm_head.weight *= 20  # else every token is about as likely, and the weights are about equal
    exact = copy.deepcopy(model).double()
    wanted = by_formula(exact, formula)
    if packed:
        packed_attention("sdpa").install(model)
    if chunked:
        loss_path(rows=8).install(model)
    batch = collate(examples(), pad_id=0) if not packed else pack(examples())
    found = token_loss(name, constants)(model, batch).loss / batch.weight
    assert relative(found.detach(), wanted.detach()) <= FP32
    ours, theirs = gradients(model, found), gradients(exact, wanted)
    assert max(relative(ours[name], theirs[name]) for name in ours) <= FP32
    plain = sft_loss(model, batch).loss / batch.weight  # twin
    assert relative(plain.detach(), wanted.detach()) > 0.05
    with torch.no_grad():  # evaluations report the cross entropy
        evaluated = token_loss(name, constants)(model, batch)
    assert float(evaluated.loss) / batch.weight == pytest.approx(float(plain.detach()), rel=FP32)
    assert "correct" in evaluated.sums


@pytest.mark.parametrize("case", CASES)
def test_under_autocast_the_chunked_head_is_the_plain_one(folder, case):
    name, constants, _ = CASES[case]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").train()
    batch = collate(examples(), pad_id=0)
    found = []
    for chunked in (False, True):
        if chunked:
            loss_path(rows=8).install(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = token_loss(name, constants)(model, batch).loss / batch.weight
        found.append((loss.detach(), gradients(model, loss)))
    assert relative(found[1][0], found[0][0]) <= FP32
    assert max(relative(found[1][1][name], one) for name, one in found[0][1].items()) <= BF16


@pytest.mark.parametrize("case", CASES)
def test_a_batch_with_nothing_to_learn_is_zero_with_gradients_of_zero(folder, case):
    name, constants, _ = CASES[case]
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    batch = collate(examples(), pad_id=0)
    nothing = replace(batch, targets=torch.full_like(batch.targets, IGNORE))
    loss = token_loss(name, constants)(model, nothing).loss
    assert float(loss.detach()) == 0
    assert not any(bool(one.any()) for one in gradients(model, loss).values())
