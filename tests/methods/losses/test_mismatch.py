"""What engine and trainer differ by, and corrections of it: by hand, and against exact expectations."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.methods.losses.mismatch import Correction, kept_alone, mismatch

REAL = torch.tensor([[True, True], [True, False]])
RATIOS = torch.tensor([[4.0, 0.5], [0.25, 9.0]])  # 9.0 stands behind the end of its answer


@pytest.mark.parametrize(
    ("kind", "low", "high", "wanted", "cut"),
    [
        ("token_truncate", None, 3.0, [[3, 0.5], [0.25, 0]], 1 / 3),
        ("token_truncate", 0.4, 3.0, [[3, 0.5], [0.4, 0]], 2 / 3),
        ("token_mask", None, 3.0, [[0, 0.5], [0.25, 0]], 1 / 3),
        ("token_mask", 0.4, None, [[4, 0.5], [0, 0]], 1 / 3),
        ("sequence_truncate", None, 1.5, [[1.5, 1.5], [0.25, 0]], 2 / 3),
        ("sequence_mask", None, 1.5, [[0, 0], [0.25, 0]], 2 / 3),
        ("sequence_mask", None, 3.0, [[2, 2], [0.25, 0]], 0.0),
        ("sequence_mask", None, None, [[2, 2], [0.25, 0]], 0.0),
    ],
)
def test_weights_by_hand(kind, low, high, wanted, cut):
    found, share = Correction(kind, low, high).weights(RATIOS.log(), REAL)
    assert found.tolist() == [pytest.approx(row) for row in wanted]
    assert share == pytest.approx(cut)


def test_figures_by_hand():
    """Ratios of 2, 1/2 and 1; of the last place the engine tells nothing."""
    real = torch.ones(2, 2, dtype=torch.bool)
    drawn = torch.tensor([[-1.0, -1.0], [-1.0, math.nan]])
    found = mismatch(torch.tensor([[-1 + math.log(2), -1 - math.log(2)], [-1.0, -5.0]]), drawn, real)
    assert found["mismatch"] == pytest.approx(2 * math.log(2) / 3, rel=1e-6)
    assert found["mismatch_most"] == pytest.approx(math.log(2), rel=1e-6)
    assert found["mismatch_k3"] == pytest.approx((2 + 0.5 + 1 - 3) / 3, rel=1e-6)
    assert found["sample_size"] == pytest.approx(3.5**2 / (3 * (4 + 0.25 + 1)), rel=1e-6)
    assert mismatch(drawn, torch.full_like(drawn, math.nan), real) == {}


# --- a policy of three tokens, of which the engine draws from two -----------------------------------------------------

TRAINER = torch.tensor([0.3, -0.5, 0.9], dtype=torch.float64)
ENGINE = torch.tensor([0.5, -0.9, 0.8], dtype=torch.float64)  # rounds otherwise; token 1 is beyond its top_p
KEPT = torch.tensor([[0, 0], [0, 2]])
REWARD = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)
EXACT = 1e-6  # weights are held in fp32


def among_kept(logits: torch.Tensor) -> torch.Tensor:
    return kept_alone(logits.log_softmax(0)[None], KEPT)[0]


def expectation(kind: str, trainer: torch.Tensor) -> tuple[float, list[float]]:
    """Of weight x reward, and of its gradient, over what the engine draws: no draw, no error."""
    logits = trainer.clone().requires_grad_()
    own, drawn = among_kept(logits), among_kept(ENGINE)
    real = torch.ones(1, 1, dtype=torch.bool)
    value, learned = 0.0, torch.zeros((), dtype=torch.float64)
    for token in KEPT[1].tolist():
        likely = float(drawn[token].exp())
        weight = 1.0
        if kind != "none":
            apart = (own - drawn)[token].detach().reshape(1, 1)
            weight = float(Correction(kind, None, None).weights(apart, real)[0])
        value += likely * weight * float(REWARD[token])
        learned = learned + likely * weight * REWARD[token] * own[token]
    learned.backward()
    return value, logits.grad.tolist()


def wanted() -> tuple[float, list[float]]:
    """Of the policy that learns, among what can be drawn."""
    logits = TRAINER.clone().requires_grad_()
    likely = logits[KEPT[1]].softmax(0)
    value = (likely * REWARD[KEPT[1]]).sum()
    value.backward()
    return float(value.detach()), logits.grad.tolist()


@pytest.mark.parametrize("kind", ["token_truncate", "sequence_mask"])
def test_the_corrected_ratio_is_unbiased_among_what_can_be_drawn(kind):
    value, gradient = expectation(kind, TRAINER)
    exact, learned = wanted()
    assert value == pytest.approx(exact, abs=EXACT)
    assert gradient == pytest.approx(learned, abs=EXACT)
    assert abs(gradient[1]) < 1e-15  # what cannot be drawn learns nothing


def test_twin_uncorrected_it_is_biased():
    assert expectation("none", TRAINER)[0] != pytest.approx(wanted()[0], abs=1e-3)


def test_twin_a_ratio_among_all_tokens_is_too_small_by_the_share_of_those_that_can_be_drawn():
    """trl#6789: the trainer's probability among all, the engine's among those that it kept."""
    drawn = among_kept(ENGINE)
    share = float(TRAINER.softmax(0)[KEPT[1]].sum())
    own = TRAINER.log_softmax(0)
    found = sum(float(drawn[token].exp() * (own - drawn)[token].exp() * REWARD[token]) for token in KEPT[1].tolist())
    assert found == pytest.approx(share * wanted()[0], abs=EXACT)
    assert abs(found - wanted()[0]) > 1e-2


def test_without_a_cut_nothing_changes():
    log_p = TRAINER.log_softmax(0)[None]
    assert kept_alone(log_p, None) is log_p
    everything = torch.tensor([[0, 0, 0], [0, 1, 2]])
    assert kept_alone(log_p, everything)[0].tolist() == pytest.approx(log_p[0].tolist(), abs=1e-12)
