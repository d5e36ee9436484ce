"""Stage grpo's arithmetic against numbers worked out by hand, and its estimators against exact expectations."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from surefoot.data.batching.groups import GroupEpisode, group_batches, groups_from_tensors, groups_to_tensors
from surefoot.data.batching.loader import Layout
from surefoot.method_facts.losses import GROUP_LOSSES, GroupLossFacts
from surefoot.methods.losses.grpo import (
    GroupSettings,
    group_advantages,
    group_terms,
    overlong_penalty,
    pass_at_k,
    penalized,
    without_spread,
)

NONE = math.nan
GROUP_OF = GROUP_LOSSES["grpo"]


def row(**words) -> GroupLossFacts:
    return GroupLossFacts(source="here", **words)


@pytest.mark.parametrize(
    ("facts", "scores", "wanted"),
    [
        (row(scale="none"), [[1, 0, 2]], [[0, -1, 1]]),
        (row(), [[1, 0, 2]], [[0, -1 / (1 + 1e-4), 1 / (1 + 1e-4)]]),
        (row(baseline="others", scale="none"), [[1, 0, 2]], [[0, -1.5, 1.5]]),
        (row(baseline="step", scale="none"), [[1, 0], [3, 4]], [[-1, -2], [1, 2]]),
        (row(scale="step"), [[0, 2], [5, 5]], [[-1 / (6**0.5 + 1e-4), 1 / (6**0.5 + 1e-4)], [0, 0]]),
        # An answer without a score is in no mean, and gets nothing.
        (row(scale="none"), [[1, NONE, 2]], [[-0.5, 0, 0.5]]),
        (row(baseline="others", scale="none"), [[1, NONE, 2]], [[-1, 0, 1]]),
        # Alone in its group it has nothing to be compared with; 0.0 is a score.
        (row(scale="none"), [[NONE, 7], [0, 1]], [[0, 0], [-0.5, 0.5]]),
        (row(), [[3, 3]], [[0, 0]]),
    ],
)
def test_advantages_by_hand(facts, scores, wanted):
    found = group_advantages(torch.tensor(scores, dtype=torch.float64), facts)
    assert found.tolist() == [pytest.approx(one, abs=1e-12) for one in wanted]


def test_groups_without_spread():
    scores = torch.tensor([[1.0, 1.0], [0.0, 1.0], [NONE, 1.0], [NONE, NONE]])
    assert without_spread(scores).tolist() == [True, False, True, True]


def test_a_penalty_in_the_score_by_hand():
    scores, real = torch.tensor([1.0, 2.0]), torch.tensor([[True, True], [True, False]])
    logprobs, reference = torch.tensor([[-1.0, -2.0], [-3.0, 9.0]]), torch.tensor([[-2.0, -2.5], [-1.0, 5.0]])
    assert penalized(scores, logprobs, reference, real, 0.1).tolist() == pytest.approx([1 - 0.15, 2 + 0.2])


def test_the_soft_penalty_of_long_answers_by_hand():
    """Equation 13 of Yu et al. 2025 with L_max = 20 and L_cache = 5."""
    assert overlong_penalty(torch.tensor([1, 15, 16, 19, 20]), 20, 5).tolist() == pytest.approx([0, 0, -0.2, -0.8, -1])


def test_pass_at_k_is_the_share_of_draws_of_k_with_one_that_passes():
    """Counted over all draws of k of the n answers; the naive 1 - (1 - c / n)^k is biased."""
    for n, c, k in ((5, 2, 3), (4, 0, 2), (3, 3, 1), (6, 1, 6)):
        answers = [place < c for place in range(n)]
        draws = [any(one) for one in itertools.combinations(answers, k)]
        found = pass_at_k(torch.tensor([c]), torch.tensor([n]), k)
        assert found == pytest.approx(sum(draws) / len(draws), abs=1e-12)
    assert pass_at_k(torch.tensor([2]), torch.tensor([5]), 3) != pytest.approx(1 - (1 - 2 / 5) ** 3)
    assert pass_at_k(torch.tensor([1, 1]), torch.tensor([2, 1]), 2) == 1.0  # one of them has a single answer
    assert math.isnan(pass_at_k(torch.tensor([1]), torch.tensor([1]), 2))


def episode(place, member, logprobs, advantage, counted=True, response=None) -> GroupEpisode:
    size = len(logprobs)
    return GroupEpisode(
        place, member, (1,), response or tuple(range(size)), place, advantage, counted, torch.tensor(logprobs), None
    )


def loss_of(facts, episodes, logprobs, clip=(0.2, 0.2), limit=4):
    (batch,) = group_batches(episodes, Layout(0, 9), of_tokens=facts.mean == "tokens")
    order = sorted(range(len(episodes)), key=lambda one: len(episodes[one].response), reverse=True)
    own = torch.cat([torch.tensor(logprobs[one]) for one in order])
    settings = GroupSettings(facts, *clip, kl=0.0, temperature=1.0, limit=limit)
    return group_terms(settings, own, batch), batch.weight


def test_one_answer_by_hand():
    """Ratios e^0.1 and e^0.5 at an advantage of 2: the second is cut at 1.2."""
    episodes = [episode(0, 0, [-1.0, -1.0], 2.0)]
    for mean, wanted in (("tokens", 2), ("answers", 1), ("limit", 1)):
        found, weight = loss_of(row(mean=mean), episodes, [[-0.9, -0.5]])
        share = {"tokens": 1, "answers": 1 / 2, "limit": 1 / 4}[mean]
        assert weight == wanted
        assert float(found.loss) == pytest.approx(-share * 2 * (math.exp(0.1) + 1.2))
        assert float(found.sums["clip_high"]) / weight == pytest.approx(0.5)


def test_masked_answers_are_not_learned_and_count_among_answers_alone():
    episodes = [episode(0, 0, [-1.0, -1.0], 2.0), episode(0, 1, [-1.0], -2.0, counted=False)]
    logprobs = [[-1.0, -1.0], [-1.0]]
    by_tokens, tokens = loss_of(row(), episodes, logprobs)
    by_answers, answers = loss_of(row(mean="answers"), episodes, logprobs)
    assert (tokens, float(by_tokens.loss)) == (2, -4.0)
    assert (answers, float(by_answers.loss)) == (2, -2.0)


def test_saved_episodes_come_back():
    known = [
        episode(3, 1, [-1.0, -2.0], 0.1),
        GroupEpisode(4, 0, (5, 6), (7,), "a.json:9", -0.3, False, torch.tensor([-0.5]), None),
    ]
    again = groups_from_tensors(groups_to_tensors(known), [one.number for one in known])
    assert all(torch.equal(one.logprobs, two.logprobs) for one, two in zip(known, again, strict=True))
    plain = [(one.place, one.member, one.prompt, one.response, one.number, one.advantage, one.counted) for one in known]
    assert plain == [
        (one.place, one.member, one.prompt, one.response, one.number, one.advantage, one.counted) for one in again
    ]


# --- a policy of three tokens, whose expectations are sums over all its answers ---------------------------------------

LOGITS = [0.3, -0.5, 0.9]
REWARD = {(0,): 1.0, (1, 0): -0.5, (1, 1): 2.0, (1, 2): 0.0, (2,): 0.25}  # token 1 goes on once


def exact_gradient() -> torch.Tensor:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    sum(logp[list(answer)].sum().exp() * reward for answer, reward in REWARD.items()).backward()
    return logits.grad


def expected_gradient(facts: GroupLossFacts, size: int = 3) -> torch.Tensor:
    """Of minus the loss over all groups of so many answers, weighed by how likely each is: no draw, no error."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    total = torch.zeros((), dtype=torch.float64)
    for group in itertools.product(REWARD, repeat=size):
        likely = math.exp(sum(logp.detach()[token].item() for answer in group for token in answer))
        advantages = group_advantages(torch.tensor([[REWARD[one] for one in group]]), facts).flatten()
        episodes = [
            GroupEpisode(0, number, (0,), one, 0, float(adv), True, logp[list(one)].detach().float(), None)
            for number, (one, adv) in enumerate(zip(group, advantages, strict=True))
        ]
        (batch,) = group_batches(episodes, Layout(0, size), of_tokens=facts.mean == "tokens")
        order = sorted(group, key=lambda one: 1 + len(one), reverse=True)
        own = torch.cat([logp[list(one)] for one in order])
        # The limit is 1, so that the loss is the sum over an answer's tokens, of which the gradient is known.
        found = group_terms(GroupSettings(facts, 9.0, 9.0, 0.0, 1.0, 1), own, batch)
        total = total - likely * found.loss / batch.weight
    total.backward()
    return logits.grad


ROUNDING = 1e-6  # advantages and weights are held in fp32


def test_the_leave_one_out_estimator_is_the_policy_gradient():
    found = expected_gradient(row(baseline="others", scale="none", mean="limit"))
    assert found.tolist() == pytest.approx(exact_gradient().tolist(), abs=ROUNDING)


def test_a_group_mean_shortens_the_gradient_by_one_answer():
    """The answer's own score is in its baseline: (G - 1) / G of the gradient, as Kool et al. 2019 show."""
    found = expected_gradient(row(scale="none", mean="limit"))
    assert found.tolist() == pytest.approx((2 / 3 * exact_gradient()).tolist(), abs=ROUNDING)


def test_twin_a_mean_over_tokens_of_each_answer_is_biased():
    found = expected_gradient(row(baseline="others", scale="none", mean="answers"))
    assert found.tolist() != pytest.approx(exact_gradient().tolist(), abs=1e-3)


# --- the penalty, of one token that an older policy drew --------------------------------------------------------------

OLD, REFERENCE = [0.9, 0.1, -0.4], [-0.2, 0.6, 0.1]


def penalty_gradient(*, by_ratio: bool) -> torch.Tensor:
    """Of the penalty alone, over all that the older policy draws."""
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    drawn, reference = (torch.tensor(one, dtype=torch.float64).log_softmax(0) for one in (OLD, REFERENCE))
    total = torch.zeros((), dtype=torch.float64)
    for token in range(len(LOGITS)):
        own = (0, 0, (0,), (token,), 0, 0.0, True, drawn[[token]].float(), reference[[token]].float())
        (batch,) = group_batches([GroupEpisode(*own)], Layout(0, 1), of_tokens=True)
        settings = GroupSettings(row(), 9.0, 9.0, 1.0, 1.0, 1, kl_by_ratio=by_ratio)
        total = total + drawn[token].exp() * group_terms(settings, logp[[token]], batch).loss
    total.backward()
    return logits.grad


def exact_penalty_gradient() -> torch.Tensor:
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    logp, reference = logits.log_softmax(0), torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(0)
    (logp.exp() * (logp - reference)).sum().backward()
    return logits.grad


def test_a_penalty_by_ratio_is_that_of_the_policy_that_learns():
    found = penalty_gradient(by_ratio=True)
    assert found.tolist() == pytest.approx(exact_penalty_gradient().tolist(), abs=ROUNDING)


def test_twin_without_the_ratio_it_is_another():
    found = penalty_gradient(by_ratio=False)
    assert found.tolist() != pytest.approx(exact_penalty_gradient().tolist(), abs=1e-2)
