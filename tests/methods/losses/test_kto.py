"""KTO: a table by hand in float64, and one KL for the whole step."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from surefoot.data.batching.batch import Batch, JudgedBatch
from surefoot.methods.losses import kto
from surefoot.methods.losses.kto import Weights, answer_losses, kto_loss
from surefoot.methods.losses.logprobs import AnswerLogProbs

FLOAT64 = 1e-12
FP32 = 1e-6  # a handful of fp32 operations
RATIOS = [1.5, -2.0, 0.25, 3.0, -0.5, 0.25]
GOOD = [True, True, False, False, True, True]


def by_hand(ratio: float, good: bool, kl: float, weights: Weights) -> float:
    scaled = weights.beta * (ratio - kl if good else kl - ratio)
    return (weights.good if good else weights.bad) * (1 - 1 / (1 + math.exp(-scaled)))


def test_by_hand():
    weights = Weights(0.3, good=1.3, bad=0.6)
    found = answer_losses(torch.tensor(RATIOS, dtype=torch.float64), torch.tensor(GOOD), 0.4, weights)
    expected = [by_hand(*pair, 0.4, weights) for pair in zip(RATIOS, GOOD, strict=True)]
    assert found.tolist() == pytest.approx(expected, rel=FLOAT64)
    turned = answer_losses(torch.tensor(RATIOS, dtype=torch.float64), ~torch.tensor(GOOD), 0.4, weights)
    assert turned.tolist() != pytest.approx(expected, rel=1e-3)  # twin


def batches(*sizes: int, kl: float | None = 0.25) -> list[JudgedBatch]:
    """Answers of the table, whose log-probabilities under the policy are their ratios, in micro-batches."""
    good = torch.tensor(GOOD)
    shares = {"good_share": 6 / int(good.sum()), "bad_share": 6 / int((~good).sum())}
    found, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        ids = torch.arange(start, start + size)[:, None]
        rows = Batch(ids, ids, None, size, (1,) * size, tuple(range(start, start + size)))
        found.append(JudgedBatch(rows, good[part], None, size, kl, torch.zeros(size), **shares))
        start += size
    return found


@pytest.fixture(autouse=True)
def ratios_as_logprobs(monkeypatch):
    """The model is left out: row i of the table has its ratio as log-probability."""

    def stand_in(model, rows: Batch) -> AnswerLogProbs:
        sums = torch.tensor(RATIOS)[rows.input_ids.flatten()]
        return AnswerLogProbs(sums, torch.ones_like(sums), sums[:0])

    monkeypatch.setattr(kto, "answer_logprobs", stand_in)


def step(*micro: JudgedBatch) -> dict[str, float]:
    objective, found = kto_loss(Weights(0.3, good=1.3, bad=0.6)), {}
    for batch in micro:
        out = objective(torch.nn.Module(), batch)
        for name, value in {"loss": out.loss, **out.sums}.items():
            found[name] = found.get(name, 0.0) + float(value) / 6
    return found


def test_what_is_logged():
    found = step(*batches(6))
    good = [ratio for ratio, is_good in zip(RATIOS, GOOD, strict=True) if is_good]
    bad = [ratio for ratio, is_good in zip(RATIOS, GOOD, strict=True) if not is_good]
    expected = {
        "reward_good": 0.3 * sum(good) / 4,
        "reward_bad": 0.3 * sum(bad) / 2,
        "reward_margin": 0.3 * (sum(good) / 4 - sum(bad) / 2),
        "logp_good": sum(good) / 4,
        "logp_bad": sum(bad) / 2,
        "reward_accuracy": (1 + 0 + 0.5 + 0 + 0 + 0.5) / 6,  # two ties
        "kl": 0.25,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=FP32)


def test_the_split_changes_nothing():
    whole = step(*batches(6))
    assert step(*batches(1, 2, 3)) == pytest.approx(whole, rel=FP32)
    own = [replace(batch, kl=kl) for batch, kl in zip(batches(1, 2, 3), (1.5, 0.0, 0.9), strict=True)]
    assert step(*own)["loss"] != pytest.approx(whole["loss"], rel=1e-2)  # twin: a KL for each micro-batch


def test_a_step_without_bad_answers_names_none():
    out = kto_loss(Weights(0.3))(torch.nn.Module(), replace(batches(2)[0], bad_share=0.0))
    assert not {"reward_bad", "logp_bad", "reward_margin"} & out.sums.keys()
    assert {"reward_good", "reward_accuracy", "kl"} <= out.sums.keys()


def test_what_is_missing_is_an_error():
    for batch in (batches(6, kl=None)[0], replace(batches(6)[0], reference=None)):
        with pytest.raises(ValueError, match="lacks"):
            kto_loss(Weights(0.3))(torch.nn.Module(), batch)
