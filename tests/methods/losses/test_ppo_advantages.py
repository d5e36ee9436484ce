"""Rewards, advantages and returns: tables worked out by hand, and TRL's PPOTrainer written out as slow loops."""

from __future__ import annotations

import math

import pytest
import torch

from surefoot.methods.losses.ppo import (
    advantages_and_returns,
    answer_distance,
    answer_kl,
    explained_variance,
    response_mask,
    token_rewards,
    whiten,
)

# float64: a handful of operations on numbers around 1.
FLOAT64 = 1e-12


def assert_same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=FLOAT64)


def table(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# Two answers, of three tokens and of one; what stands beyond an answer must not matter.
JUNK = 777.0
REAL = response_mask(torch.tensor([3, 1]), 3)
LOGPROBS = table([-1.0, -2.0, -0.5], [-0.25, JUNK, -JUNK])
REFERENCE = table([-1.5, -1.0, -0.5], [-0.75, JUNK, JUNK])
SCORES = torch.tensor([2.0, -9.0], dtype=torch.float64)
VALUES = table([0.5, 1.0, -0.5], [0.25, JUNK, JUNK])


def test_rewards_of_a_table_worked_out_by_hand():
    # -0.1 * (0.5, -1, 0) and the score 2 on the third token; -0.1 * 0.5 and -9, clipped to -5, on the first.
    found = token_rewards(LOGPROBS, REFERENCE, SCORES, REAL, kl=0.1, clip=5.0)
    assert_same(found, table([-0.05, 0.1, 2.0], [-5.05, 0.0, 0.0]))
    unclipped = token_rewards(LOGPROBS, REFERENCE, SCORES, REAL, kl=0.1, clip=None)
    assert unclipped[1, 0].item() == pytest.approx(-9.05)
    assert_same(answer_kl(LOGPROBS, REFERENCE, REAL), table([-0.5, 0.5])[0])


def test_advantages_of_a_table_worked_out_by_hand():
    # With gamma 0.9, lambda 0.5, from the back:
    #   A3 = 2 + 0.5                            = 2.5
    #   A2 = 0.1 + 0.9 * -0.5 - 1 + 0.45 * 2.5  = -0.225
    #   A1 = -0.05 + 0.9 * 1 - 0.5 + 0.45 * A2  = 0.24875
    # The second answer: -5.05 - 0.25 = -5.3.
    rewards = table([-0.05, 0.1, 2.0], [-5.05, JUNK, JUNK])
    advantages, returns = advantages_and_returns(rewards, VALUES, REAL, gamma=0.9, lam=0.5)
    assert_same(advantages, table([0.24875, -0.225, 2.5], [-5.3, 0.0, 0.0]))
    assert_same(returns, table([0.74875, 0.775, 2.0], [-5.05, 0.0, 0.0]))


def test_the_score_stands_on_the_last_real_token_and_never_one_past_it():
    found = token_rewards(LOGPROBS, REFERENCE, SCORES, REAL, kl=0.0, clip=None)
    assert found.tolist() == [[0.0, 0.0, 2.0], [-9.0, 0.0, 0.0]]


def test_an_answer_of_its_stop_token_alone_gets_its_score_there_and_one_without_tokens_none():
    real = response_mask(torch.tensor([1, 0]), 2)
    found = token_rewards(table([0.0, 1.0], [1.0, 1.0]), table([0.0, 0.0], [0.0, 0.0]), SCORES, real, kl=1.0, clip=None)
    assert found.tolist() == [[2.0, 0.0], [0.0, 0.0]]
    advantages, returns = advantages_and_returns(found, table([0.5, 0.5], [0.5, 0.5]), real, gamma=1.0, lam=0.95)
    assert advantages.tolist() == [[1.5, 0.0], [0.0, 0.0]]
    assert returns.tolist() == [[2.0, 0.0], [0.0, 0.0]]


def test_lambda_one_is_the_return_itself_and_lambda_zero_the_next_step():
    rewards = token_rewards(LOGPROBS, REFERENCE, SCORES, REAL, kl=0.1, clip=5.0)
    _, returns = advantages_and_returns(rewards, VALUES, REAL, gamma=1.0, lam=1.0)
    assert_same(returns[0], rewards[0].flip(0).cumsum(0).flip(0))
    advantages, _ = advantages_and_returns(rewards, VALUES, REAL, gamma=1.0, lam=0.0)
    assert_same(advantages[0, :2], (rewards + VALUES.roll(-1, 1) - VALUES)[0, :2])


def test_whitened_advantages_have_mean_0_and_deviation_1_over_real_tokens():
    found = whiten(LOGPROBS, REAL)
    assert_same(found[REAL].mean(), torch.tensor(0.0, dtype=torch.float64))
    assert_same(found[REAL].std(correction=0), torch.tensor(1.0, dtype=torch.float64))
    assert not found[~REAL].any()


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e6])
def test_constant_advantages_become_0_and_no_nan(constant):
    found = whiten(torch.full((3, 7), constant, dtype=torch.float32), torch.ones(3, 7, dtype=torch.bool))
    assert found.tolist() == torch.zeros(3, 7).tolist()


def test_explained_variance():
    returns = table([1.0, 2.0, 3.0], [4.0, JUNK, JUNK])
    assert explained_variance(returns + 5, returns, REAL) == pytest.approx(1.0)
    assert explained_variance(torch.zeros_like(returns), returns, REAL) == 0.0
    assert explained_variance(-returns, returns, REAL) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones_like(returns), REAL) == 0.0


def trl_advantages(logprobs, ref_logprobs, scores, values, lengths, *, kl_coef, gamma, lam):
    """One answer after the other, one token after the other, as `PPOTrainer.train` of TRL 0.11 to 0.24 has it."""
    all_advantages, all_returns = [], []
    for row, length in enumerate(lengths):
        rewards = [-kl_coef * float(logprobs[row][t] - ref_logprobs[row][t]) for t in range(length)]
        rewards[length - 1] += float(scores[row])
        last, backwards = 0.0, []
        for t in reversed(range(length)):
            next_value = float(values[row][t + 1]) if t < length - 1 else 0.0
            delta = rewards[t] + gamma * next_value - float(values[row][t])
            last = delta + gamma * lam * last
            backwards.append(last)
        advantages = backwards[::-1]
        all_advantages += advantages
        all_returns += [advantage + float(values[row][t]) for t, advantage in enumerate(advantages)]
    return all_advantages, all_returns


def random_rollout(seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([5, 1, 8, 3])
    tables = [torch.randn(4, 8, generator=draw, dtype=torch.float64) for _ in range(3)]
    return lengths, *tables, 3 * torch.randn(4, generator=draw, dtype=torch.float64)


def found_flat(gamma=0.97, lam=0.9, shift=0):
    lengths, logprobs, reference, values, scores = random_rollout()
    real = response_mask(lengths + shift, 8)
    rewards = token_rewards(logprobs, reference, scores, real, kl=0.2, clip=None)
    advantages, returns = advantages_and_returns(rewards, values, real, gamma=gamma, lam=lam)
    real = response_mask(lengths, 8)
    return advantages[real], returns[real]


def trl_flat():
    lengths, logprobs, reference, values, scores = random_rollout()
    return trl_advantages(logprobs, reference, scores, values, lengths.tolist(), kl_coef=0.2, gamma=0.97, lam=0.9)


def test_same_as_trl_written_out():
    for mine, theirs in zip(found_flat(), trl_flat(), strict=True):
        assert_same(mine, torch.tensor(theirs, dtype=torch.float64))


@pytest.mark.parametrize("broken", [{"gamma": 0.96}, {"lam": 0.91}, {"shift": 1}])
def test_another_discount_or_a_score_one_token_late_is_noticed(broken):
    mine, theirs = found_flat(**broken)[0], torch.tensor(trl_flat()[0], dtype=torch.float64)
    assert not torch.allclose(mine, theirs, rtol=0.0, atol=FLOAT64)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_whitening_hides_nothing_that_is_not_finite(bad):
    values = LOGPROBS.clone()
    values[0, 0] = bad
    assert REAL[0, 0]
    found = whiten(values, REAL)
    assert found[REAL].isnan().all()
    assert (found[~REAL] == 0).all()
    centred = LOGPROBS - LOGPROBS[REAL].mean()
    assert whiten(LOGPROBS, REAL)[REAL].tolist() == pytest.approx(  # the twin: finite ones are as they were
        (centred / centred[REAL].square().mean().sqrt())[REAL].tolist(), rel=1e-5
    )


def test_the_distance_is_never_negative_and_worked_out_by_hand():
    logprobs = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, 0.0, 0.0]], dtype=torch.float64)
    reference = torch.tensor([[-0.5, -1.0, 1.0], [-20.0, 0.0, 0.0]], dtype=torch.float64)
    real = response_mask(torch.tensor([2, 1]), 3)
    first = (math.exp(0.5) - 1 - 0.5) + (math.exp(1.0) - 1 - 1.0)
    second = math.exp(-19.5) - 1 + 19.5
    assert answer_distance(logprobs, reference, real).tolist() == pytest.approx([first, second], rel=1e-12)
    assert answer_kl(logprobs, reference, real)[0] == -1.5  # what a bound would never see
    # one odd token: the ratio is held at e^5
    odd = answer_distance(torch.tensor([[-30.0]]), torch.tensor([[0.0]]), torch.tensor([[True]]))
    assert odd.item() == pytest.approx(math.exp(5) - 6, rel=1e-6)


def test_the_distance_estimates_the_kl():
    """Draws of a categorical distribution, against the exact sum."""
    torch.manual_seed(0)
    p, q = (torch.randn(20, dtype=torch.float64).log_softmax(0) for _ in range(2))
    exact = (p.exp() * (p - q)).sum().item()
    drawn = torch.multinomial(p.exp(), 200_000, replacement=True)
    real = torch.ones(len(drawn), 1, dtype=torch.bool)
    found = answer_distance(p[drawn][:, None], q[drawn][:, None], real).mean().item()
    assert found == pytest.approx(exact, rel=0.02)  # 200,000 draws scatter by less than a hundredth
