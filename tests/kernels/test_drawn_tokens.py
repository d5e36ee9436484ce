"""Log-probabilities of drawn tokens a few positions at a time, against a softmax over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gpu.devices import DEVICES
from kernels.test_chunked_loss import CHANGES, FP32, FP64, NARROW, N, V, assert_close, gradients, problem, relative
from surefoot.kernels.chunked_loss import Head, separate
from surefoot.kernels.drawn_tokens import DrawnTokens

FACTORS = torch.linspace(-2, 3, N, dtype=torch.float64)
# 1 to 5 tokens of each position could be drawn, its own among them.
_, _, _, TARGETS = problem()
KEPT = torch.tensor(
    [(place, (int(word) + 7 * more) % V) for place, word in enumerate(TARGETS) for more in range(1 + place % 5)]
).T


def expected(logits, temperature, kept):
    """Log-probabilities [N] and entropies [N]."""
    if kept is not None:
        could = torch.zeros_like(logits, dtype=torch.bool)
        could[kept[0], kept[1]] = True
        logits = logits.masked_fill(~could, -torch.inf)
    log_p = (logits / temperature).log_softmax(1)
    p = log_p.exp()
    return log_p.gather(1, TARGETS[:, None]).squeeze(1), -torch.where(p > 0, p * log_p, 0.0).sum(1)


@pytest.mark.parametrize(("temperature", "kept"), [(1.0, None), (0.7, None), (1.0, KEPT), (1.3, KEPT)])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_log_probabilities_gradients_and_entropies(rows, temperature, kept):
    hidden, weight, shift, _ = problem(trains=False)
    wanted, entropies = expected(F.linear(hidden, weight, shift), temperature, kept)
    loss = DrawnTokens(TARGETS, temperature, kept)
    found = -separate(hidden, Head(weight, shift, rows), loss)
    assert_close([found], [wanted], FP64)
    assert_close(gradients(found @ FACTORS, hidden), gradients(wanted @ FACTORS, hidden), FP64)
    assert relative(loss.entropy, entropies) <= FP32  # kept in fp32, to be logged
    with torch.no_grad():
        assert (
            relative(separate(hidden, Head(weight, shift, rows), DrawnTokens(TARGETS, temperature, kept)), -wanted)
            <= FP64
        )
    twin, _ = expected(F.linear(hidden, weight, shift), 0.9 * temperature, kept)
    assert relative(found, twin) > 1e-3


def test_a_change_of_the_model_comes_before_the_temperature():
    settings, changed = CHANGES["cap"]
    hidden, weight, _, _ = problem(trains=False, bias=False)
    wanted, _ = expected(changed(F.linear(hidden, weight)), 0.7, KEPT)
    found = -separate(hidden, Head(weight, None, 5, **settings), DrawnTokens(TARGETS, 0.7, KEPT))
    assert_close([found], [wanted], FP64)
    assert_close(gradients(found @ FACTORS, hidden), gradients(wanted @ FACTORS, hidden), FP64)


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("device", DEVICES)
def test_under_autocast(device, narrow):
    hidden, weight, _, _ = problem(torch.float32, trains=False, bias=False)
    hidden, weight = hidden.detach().to(device).requires_grad_(), weight.to(device)
    with torch.autocast(device, dtype=narrow):
        drawn = DrawnTokens(TARGETS.to(device), 0.7, KEPT.to(device))
        found = -separate(hidden, Head(weight, None, 8), drawn)
    output = F.linear(hidden.to(narrow), weight.to(narrow)).float().cpu()
    wanted, entropies = expected(output, 0.7, KEPT)
    assert relative(found.cpu(), wanted) <= FP32
    assert relative(drawn.entropy.cpu(), entropies) <= FP32
    wanted, factors = wanted.to(device), FACTORS.float().to(device)
    assert_close(gradients(found @ factors, hidden), gradients(wanted @ factors, hidden), NARROW[narrow])
