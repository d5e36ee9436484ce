"""Divergences beside sums written out, a table by hand, and a teacher that is the student."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from surefoot.kernels import divergence as kernel
from surefoot.kernels.chunked_loss import Head, summed, summed_over
from surefoot.kernels.divergence import Distillation, Likeliest, Whole, divergence

BETAS = (0.0, 0.1, 0.5, 1.0)
EXACT = 1e-12  # relative, of float64 sums of a hundred terms
N, V, H = 11, 37, 8


def written_out(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Summed over the rows; both are log-probabilities."""
    p, q = student.exp(), teacher.exp()
    if beta == 0:
        return (q * (teacher - student)).sum()
    if beta == 1:
        return (p * (student - teacher)).sum()
    m = (beta * q + (1 - beta) * p).log()
    return (beta * q * (teacher - m) + (1 - beta) * p * (student - m)).sum()


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 2


# p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2); logarithms to base 2 are whole or of 3/8.
BY_HAND = {
    0.0: 0.25 * math.log(2),
    1.0: 0.25 * math.log(2),
    0.5: 0.5 * (0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)) * 2,
    0.25: 0.25 * (0.25 * math.log(4 / 7) + 0.5 * math.log(8 / 5))
    + 0.75 * (0.5 * math.log(8 / 7) + 0.25 * math.log(4 / 5)),
}


@pytest.mark.parametrize(("beta", "wanted"), BY_HAND.items())
def test_the_table_by_hand(beta, wanted):
    p, q = (torch.tensor([row], dtype=torch.float64).log() for row in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    values, gradient = divergence(p, q, beta)
    assert float(values) == pytest.approx(wanted, rel=EXACT)
    assert float(gradient.sum()) == pytest.approx(0.0, abs=EXACT)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("beta", "temperature", "sft"), list(product(BETAS, (1.0, 2.0), (0.0, 0.3))))
def test_loss_and_gradients_are_those_of_the_sums_written_out(beta, temperature, sft, bias):
    hidden, weight = drawn(N, H, seed=0).requires_grad_(), drawn(V, H, seed=1).requires_grad_()
    added = drawn(V, seed=2).requires_grad_() if bias else None
    taught = Whole(drawn(N, H + 2, seed=3), Head(drawn(V, H + 2, seed=4), None, 1), None, V)
    targets = torch.arange(N) * 3
    inputs = [one for one in (hidden, weight, added) if one is not None]
    loss = Distillation(taught, targets, beta=beta, temperature=temperature, sft=sft)
    value = summed(hidden, Head(weight, added, rows=4), loss)
    found = torch.autograd.grad(value, inputs)
    logits = F.linear(hidden, weight, added)
    theirs = taught.log_probabilities(slice(None), torch.float64, temperature)
    wanted = written_out((logits / temperature).log_softmax(1), theirs, beta)
    assert float(loss.divergence.sum()) == pytest.approx(float(wanted.detach()), rel=1e-6)  # kept in fp32
    wanted = wanted + sft * F.cross_entropy(logits, targets, reduction="sum")
    assert float(value.detach()) == pytest.approx(float(wanted.detach()), rel=EXACT)
    for one, other in zip(found, torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    plain = logits.detach().requires_grad_()
    assert float(summed_over(plain, loss, 5).detach()) == pytest.approx(float(wanted.detach()), rel=EXACT)


@pytest.mark.parametrize(("beta", "temperature"), list(product(BETAS, (1.0, 2.0))))
def test_what_is_known_of_the_likeliest_tokens_is_compared_with_the_rest_as_one(beta, temperature):
    logits, teacher = drawn(N, V, seed=0).requires_grad_(), (drawn(N, V, seed=1) / temperature).log_softmax(1)
    logprobs, tokens = teacher.topk(5)
    rest = (1 - logprobs.exp().sum(1)).log()
    loss = Distillation(Likeliest(tokens, logprobs, rest), tokens[:, 0], beta=beta, temperature=temperature, sft=0.0)
    value = summed_over(logits, loss, 4)
    (found,) = torch.autograd.grad(value, logits)
    own = (logits / temperature).log_softmax(1).gather(1, tokens)
    coarse = torch.cat([own, (1 - own.exp().sum(1, keepdim=True)).log()], 1)
    wanted = written_out(coarse, torch.cat([logprobs, rest[:, None]], 1), beta)
    assert float(value.detach()) == pytest.approx(float(wanted.detach()), rel=1e-10)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, logits)[0], rtol=1e-8, atol=1e-10)
    whole = written_out((logits.detach() / temperature).log_softmax(1), teacher, beta)
    assert float(value.detach()) < float(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("beta", "temperature"), list(product(BETAS, (1.0, 2.0))))
def test_a_teacher_that_is_the_student_gives_exactly_nothing(beta, temperature, dtype):
    hidden, weight = (drawn(*shape, seed=0, dtype=torch.float32).to(dtype) for shape in ((N, H), (V, H)))
    head = Head(weight.clone().requires_grad_(), None, rows=4)
    teacher = Whole(hidden, Head(weight, None, 1), None, V)
    logits = (hidden.clone() @ weight.T).float()
    log_q = (logits / temperature).log_softmax(1)
    logprobs, tokens = log_q.topk(3)
    few = Likeliest(tokens, logprobs, log_q.scatter(1, tokens, -torch.inf).logsumexp(1))
    states = hidden.clone().requires_grad_()
    how = {"beta": beta, "temperature": temperature, "sft": 0.0}
    value = summed(states, head, Distillation(teacher, tokens[:, 0], **how))
    value.backward()
    assert value == 0
    assert not states.grad.any()
    assert not head.weight.grad.any()
    plain = logits.requires_grad_()
    value = summed_over(plain, Distillation(few, tokens[:, 0], **how), 64)
    value.backward()
    assert value == 0
    assert not plain.grad.any()


def test_twin_a_divergence_by_the_logarithm_of_the_mixture_is_not_exactly_nothing(monkeypatch):
    def rounded(log_p, log_q, beta):
        mixed = torch.logaddexp(log_p + math.log(1 - beta), log_q + math.log(beta))
        p = log_p.exp()
        return (p * (log_p - mixed)).sum(1), p * (log_p - mixed)

    monkeypatch.setattr(kernel, "divergence", rounded)
    with pytest.raises(AssertionError):
        test_a_teacher_that_is_the_student_gives_exactly_nothing(0.1, 1.0, torch.float32)


@pytest.mark.parametrize("beta", BETAS)
def test_far_distributions_stay_finite(beta):
    """log q - log p reaches 400, where exp overflows in fp32."""
    logits = torch.tensor([[200.0, 0.0, -200.0]], requires_grad=True)
    known = Whole(None, None, -logits.detach(), 3)
    value = summed_over(logits, Distillation(known, torch.tensor([0]), beta=beta, temperature=1.0, sft=0.0), 1)
    value.backward()
    assert value.isfinite()
    assert logits.grad.isfinite().all()
    apart = -(1 - beta) * math.log(1 - beta) - beta * math.log(beta) if 0 < beta < 1 else 400
    assert float(value.detach()) == pytest.approx(apart, rel=1e-5)  # of logarithms of 400, in fp32


@pytest.mark.parametrize("more", ["student", "teacher"])
def test_models_of_other_sizes_are_compared_over_the_ids_that_both_have(more):
    logits, teacher = drawn(N, V, seed=0).requires_grad_(), drawn(N, V, seed=1)
    words = V - 4
    if more == "student":
        teacher = teacher[:, :words]
    else:
        logits = logits.detach()[:, :words].clone().requires_grad_()
    loss = Distillation(Whole(None, None, teacher, words), torch.zeros(N).long(), beta=0.0, temperature=1.0, sft=0.0)
    (found,) = torch.autograd.grad(summed_over(logits, loss, 4), logits)
    wanted = written_out(logits[:, :words].log_softmax(1), teacher[:, :words].log_softmax(1), 0.0)
    torch.testing.assert_close(found, torch.autograd.grad(wanted, logits)[0], rtol=1e-10, atol=1e-12)
    assert not found[:, words:].any()


def test_gradients_in_fp16_keep_what_a_bound_would_lose():
    """Of a reverse KL that is nearly 0: by far below fp16's smallest number, and lifted above it."""
    hidden, weight = drawn(N, H, seed=0).float(), drawn(V, H, seed=1).float()
    states = hidden.half().requires_grad_()
    teacher = Whole((hidden + 3e-3).half(), Head(weight.half(), None, 1), None, V)
    loss = Distillation(teacher, torch.zeros(N).long(), beta=1.0, temperature=1.0, sft=0.0)
    (found,) = torch.autograd.grad(summed(states, Head(weight.half(), None, 4), loss) * 1e4, states)
    exact = hidden.half().float().requires_grad_()
    other = Whole((hidden + 3e-3).half().float(), Head(weight.half().float(), None, 1), None, V)
    loss = Distillation(other, torch.zeros(N).long(), beta=1.0, temperature=1.0, sft=0.0)
    (wanted,) = torch.autograd.grad(summed(exact, Head(weight.half().float(), None, 4), loss) * 1e4, exact)
    assert found.isfinite().all()
    assert (found.float() - wanted).norm() < 0.5 * wanted.norm()  # the logits themselves are rounded to fp16


def test_what_it_measures():
    logits = drawn(N, V, seed=0)
    teacher = logits.clone()
    teacher[0, 5] = 99.0
    targets = logits.argmax(1)
    targets[:2] = (targets[:2] + 1) % V
    loss = Distillation(Whole(None, None, teacher, V), targets, beta=0.0, temperature=2.0, sft=0.0, measures=True)
    summed_over(logits, loss, 4)
    assert (int(loss.correct.sum()), int(loss.agrees.sum())) == (N - 2, N - 1)
    wanted = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(loss.cross_entropy.double(), wanted, rtol=1e-6, atol=1e-6)
