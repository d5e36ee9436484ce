"""Losses and gradients of stage grpo beside TRL's own, from trl_grpo.json (make_trl_grpo.py writes it)."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from equality.group_answers import BOUNDS, CASES, CORRECTED, DRAWN, ENGINE, GROUP, LIMIT, POLICY, REFERENCE, REWARDS
from surefoot.data.batching.groups import GroupBatch, GroupEpisode, group_batches
from surefoot.data.batching.loader import Layout
from surefoot.method_facts.losses import GROUP_LOSSES
from surefoot.methods.losses.grpo import GroupSettings, group_advantages, group_terms
from surefoot.methods.losses.mismatch import Correction

TRL = json.loads((Path(__file__).parent / "trl_grpo.json").read_text())["cases"]
CLOSE = 2e-5  # relative: both in fp32, sums in another order


def settings_of(name: str) -> GroupSettings:
    loss, low, high, kl = CASES[name]
    return GroupSettings(GROUP_LOSSES[loss], low, high, kl, temperature=1.0, limit=LIMIT)


def weights_of(correction: Correction) -> torch.Tensor:
    def padded(rows):
        return torch.tensor([[*row, *[0.0] * (LIMIT - len(row))] for row in rows])

    real = torch.tensor([[place < len(row) for place in range(LIMIT)] for row in POLICY])
    return correction.weights(padded(DRAWN) - padded(ENGINE), real)[0]


def batches_of(
    settings: GroupSettings, micro: int, correction: Correction | None = None, order: int = 1
) -> list[GroupBatch]:
    """The answers in batches of so many. The number of each is its place, by which gradients are found again.

    order: -1 turns it around.
    """
    weights = None if correction is None else weights_of(correction)
    advantages = group_advantages(torch.tensor(REWARDS).reshape(-1, GROUP), settings.facts).flatten()
    episodes = [
        GroupEpisode(
            place // GROUP,
            place % GROUP,
            (1, 2),
            tuple(range(len(own))),
            place,
            float(advantages[place]),
            True,
            torch.tensor(DRAWN[place]),
            torch.tensor(REFERENCE[place]),
            None if weights is None else weights[place, : len(own)],
        )
        for place, own in enumerate(POLICY)
    ]
    return group_batches(episodes[::order], Layout(0, micro), of_tokens=settings.facts.mean == "tokens")


def found(
    settings: GroupSettings, micro: int, correction: Correction | None = None, order: int = 1
) -> tuple[float, dict[int, list[float]]]:
    """The loss of the step, and the gradient by the log-probabilities of each answer."""
    batches = batches_of(settings, micro, correction, order)
    weight = sum(one.weight for one in batches)
    loss, gradients = 0.0, {}
    for batch in batches:
        own = [torch.tensor(POLICY[int(place)], requires_grad=True) for place in batch.examples]
        value = group_terms(settings, torch.cat(own), batch).loss / weight
        value.backward()
        loss += float(value.detach())
        gradients |= {int(place): one.grad.tolist() for place, one in zip(batch.examples, own, strict=True)}
    return loss, gradients


@pytest.mark.parametrize(("micro", "order"), [(6, 1), (4, 1), (1, 1), (4, -1)])
@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradient_are_trls_in_any_split_and_order(name, micro, order):
    loss, gradients = found(settings_of(name), micro, order=order)
    assert loss == pytest.approx(TRL[name]["loss"], rel=CLOSE)
    for place, wanted in enumerate(TRL[name]["gradient"]):
        assert gradients[place] == pytest.approx(wanted, rel=CLOSE, abs=1e-9)


@pytest.mark.parametrize("name", CORRECTED)
def test_loss_and_gradient_are_trls_where_the_engine_is_corrected_for(name):
    case, kind = CORRECTED[name]
    loss, gradients = found(settings_of(case), 4, Correction(kind, *BOUNDS))
    assert loss == pytest.approx(TRL[name]["loss"], rel=CLOSE)
    for place, wanted in enumerate(TRL[name]["gradient"]):
        assert gradients[place] == pytest.approx(wanted, rel=CLOSE, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_advantages_are_trls(name):
    own = group_advantages(torch.tensor(REWARDS).reshape(-1, GROUP), settings_of(name).facts).flatten()
    assert own.tolist() == pytest.approx(TRL[name]["advantages"], rel=CLOSE, abs=1e-7)


# --- the checks above have teeth -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("grpo", {"mean": "tokens"}),
        ("dapo", {"mean": "answers"}),
        ("dr_grpo", {"mean": "answers"}),
        ("gspo", {"ratio": "token"}),
        ("rloo", {"ratio": "sequence"}),
        ("cispo", {"weighs": False}),
    ],
)
def test_twin_another_row_is_another_loss(name, change):
    settings = settings_of(name)
    settings = replace(settings, facts=replace(settings.facts, **change))
    _, gradients = found(settings, 6)
    rows = [pytest.approx(row, rel=CLOSE, abs=1e-9) for row in TRL[name]["gradient"]]
    assert [gradients[place] for place in range(len(POLICY))] != rows


@pytest.mark.parametrize("kind", ["token_mask", "sequence_truncate", "sequence_mask"])
def test_twin_another_correction_is_another_gradient(kind):
    _, gradients = found(settings_of("dapo"), 4, Correction(kind, *BOUNDS))
    rows = [pytest.approx(row, rel=CLOSE, abs=1e-9) for row in TRL["dapo, token_truncate"]["gradient"]]
    assert [gradients[place] for place in range(len(POLICY))] != rows


def test_twin_a_mean_in_each_micro_batch_depends_on_the_split():
    """trl#6439, prime-rl#2562, OpenRLHF#1249."""
    settings = settings_of("dapo")
    means = [
        float(group_terms(settings, torch.cat([torch.tensor(POLICY[int(one)]) for one in batch.examples]), batch).loss)
        / batch.weight
        for batch in batches_of(settings, 4)
    ]
    assert sum(means) / len(means) != pytest.approx(TRL["dapo"]["loss"], rel=CLOSE)
