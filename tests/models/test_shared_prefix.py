"""Prompts computed once: the numbers of whole rows, gradients included, on every family on which the plan allows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from models.test_value_head import CONFIGS, drawn_head, language_model
from surefoot.data.batching.batch import Example, PairBatch, collate
from surefoot.methods.losses import reward
from surefoot.methods.losses.reward import reward_objective
from surefoot.models.shared_prefix import shared_prefixes
from surefoot.models.value_head import ScoredModel, value_width

# The same fp32 sums in another order and another shape of attention: 6e-8 per operation, some hundred operations.
FP32_RELATIVE = 1e-5
FORGETFUL = ("mistral", "phi3", "gemma2", "gemma3")  # with a window: the plan leaves their rows whole
LENGTHS = [(12, 3, 5), (9, 2, 2), (14, 5, 1)]  # prompt, better answer, worse answer


def pairs(lengths=LENGTHS) -> PairBatch:
    rng = np.random.default_rng(0)
    sides: tuple[list[Example], list[Example]] = ([], [])
    for number, (prompt, *answers) in enumerate(lengths):
        asked = rng.integers(3, 60, prompt)
        for side, length in enumerate(answers):
            ids = np.concatenate([asked, [side + 1], rng.integers(3, 60, length - 1)])
            sides[side].append(Example(ids, np.ones(len(ids), bool), number))
    return PairBatch(collate([*sides[0], *sides[1]], 0), tuple(one[0] for one in lengths), len(lengths))


def measured(model: ScoredModel, loss: str, shared: bool) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    out = reward_objective(loss, shared=shared)(model, pairs())
    out.loss.backward()
    gradients = [one.grad.flatten() for _, one in model.named_parameters() if one.grad is not None]
    return float(out.loss.detach()), torch.cat(gradients)


def differences(model: ScoredModel, loss: str) -> tuple[float, float]:
    (plain, before), (shared, after) = (measured(model, loss, way) for way in (False, True))
    return abs(shared - plain) / abs(plain), float((after - before).norm() / before.norm())


def scored(name: str) -> ScoredModel:
    model = language_model(CONFIGS[name])
    return ScoredModel(model, drawn_head(value_width(model)))


@pytest.mark.parametrize("loss", ["last", "divergence"])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in FORGETFUL])
def test_loss_and_gradients_are_those_of_whole_rows(name, loss):
    assert shared_prefixes(pairs().rows, pairs().common)
    assert max(differences(scored(name), loss)) <= FP32_RELATIVE


def test_twins_a_window_and_a_prefix_that_is_too_long_are_seen(monkeypatch):
    assert max(differences(scored("mistral"), "last")) > FP32_RELATIVE
    monkeypatch.setattr(reward, "shared_prefixes", lambda rows, common: (13, 9, 14))
    assert max(differences(scored("llama"), "last")) > FP32_RELATIVE


def test_what_is_shared_follows_from_the_shapes_alone():
    batch = pairs()
    assert shared_prefixes(batch.rows, batch.common) == (12, 9, 14)
    assert shared_prefixes(pairs([(3, 9, 9)]).rows, (3,)) is None  # too little to save
    assert shared_prefixes(batch.rows, (0, 9, 14)) is None  # nothing in common
    rows = pairs([(20, 2, 2)]).rows
    assert shared_prefixes(rows, (22,)) == (21,)  # the same answer twice: one token is left of each
    assert shared_prefixes(batch.blank().rows, batch.common) is None


def test_under_no_grad_and_autocast():
    model = scored("llama").eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        values = model(pairs().rows, shared_prefixes(pairs().rows, pairs().common))
        whole = model(pairs().rows)
    assert values.dtype == torch.float32
    at = torch.tensor(pairs().rows.lengths).unsqueeze(1) - 1
    assert torch.allclose(values.gather(1, at), whole.gather(1, at), atol=0.2)  # bf16: three digits of a sum of 32
