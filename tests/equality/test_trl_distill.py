"""Losses and gradients of stage distill beside TRL's own, from trl_distill.json (make_trl_distill.py writes it)."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch

from equality.distilled_logits import BETAS, KEPT, LABELS, STUDENT, TEACHER, TEMPERATURES
from surefoot.kernels.chunked_loss import summed_over
from surefoot.kernels.divergence import Distillation, Known, Likeliest, Whole

TRL = json.loads((Path(__file__).parent / "trl_distill.json").read_text())
CLOSE = 2e-5  # relative: both in fp32, sums in another order
SMALL = 1e-8  # of a gradient whose terms cancel
LEARNED = [place for place, label in enumerate(LABELS) if label != -100]


def whole() -> Known:
    return Whole(None, None, torch.tensor(TEACHER)[LEARNED], len(TEACHER[0]))


def likeliest(kept: int = KEPT) -> Known:
    log_q = torch.tensor(TEACHER)[LEARNED].log_softmax(1)
    logprobs, tokens = log_q.topk(kept)
    return Likeliest(tokens, logprobs, log_q.scatter(1, tokens, -torch.inf).logsumexp(1))


def found(known: Known, beta: float, temperature: float, rows: int) -> tuple[float, torch.Tensor]:
    """The mean of the learned positions, and its gradient by all logits."""
    student = torch.tensor(STUDENT, requires_grad=True)
    loss = Distillation(known, torch.tensor(LABELS)[LEARNED], beta=beta, temperature=temperature, sft=0.0)
    value = summed_over(student[LEARNED], loss, rows) / len(LEARNED)
    value.backward()
    assert student.grad is not None
    return float(value.detach()), student.grad


def far(seen: tuple[float, torch.Tensor], case: dict) -> bool:
    loss, gradient = seen
    alike = torch.isclose(gradient, torch.tensor(case["gradient"]), rtol=CLOSE, atol=SMALL).all()
    return not (bool(alike) and loss == pytest.approx(case["loss"], rel=CLOSE))


@pytest.mark.parametrize("rows", [2, 64])
@pytest.mark.parametrize(("beta", "temperature"), list(product(BETAS, TEMPERATURES)))
def test_loss_and_gradient_are_trls_in_any_split(beta, temperature, rows):
    assert not far(found(whole(), beta, temperature, rows), TRL["whole"][f"{beta} {temperature}"])


@pytest.mark.parametrize("beta", BETAS)
def test_so_are_those_of_the_likeliest_tokens_and_the_rest(beta):
    assert not far(found(likeliest(), beta, 1.0, 3), TRL["likeliest"][f"{beta}"])


def test_twins_another_divergence_temperature_or_number_of_tokens_is_seen():
    case = TRL["whole"]["0.5 1.0"]
    assert far(found(whole(), 0.45, 1.0, 64), case)
    assert far(found(whole(), 0.5, 1.01, 64), case)
    assert far(found(likeliest(), 0.5, 1.0, 64), case)
    assert far(found(likeliest(KEPT + 1), 0.5, 1.0, 64), TRL["likeliest"]["0.5"])
