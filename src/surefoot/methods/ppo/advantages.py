"""From scores to advantages: the reward of every response token, and how much better it was than the critic expected.

    reward_t    = -kl * (log p(t) - log p_ref(t)), and at the last token also the clipped score of the answer
    delta_t     = reward_t + gamma * V_{t+1} - V_t          V after the last token is 0
    advantage_t = delta_t + gamma * lambda * advantage_{t+1}
    return_t    = advantage_t + V_t

(Ziegler et al. 2019; Schulman et al. 2016; DeepSpeed-Chat's constants.) The score falls on the last token that the
answer really has; DeepSpeed-Chat's own code reaches one token past it where an answer ends before the limit.

Shapes: E episodes (answers), R tokens of the longest one. Tables [E, R] begin with the answer's first token; `real` is
True where the answer has one. Columns beyond an answer are ignored, whatever stands there, and come out as 0.
"""

from __future__ import annotations

import torch

_LARGEST = 5.0  # log of the largest ratio that an estimate of distance counts


def response_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """lengths [E] -> real [E, width]."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def answer_kl(logprobs: torch.Tensor, reference: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """[E]: sum over each answer of log p - log p_ref. Its mean estimates the KL of the policy from the reference; a
    single answer's can be negative."""
    return (logprobs - reference).where(real, 0.0).sum(dim=1)


def answer_distance(logprobs: torch.Tensor, reference: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """[E]: sum over each answer of r - 1 - log r with r = p_ref / p, which is never negative and estimates the same KL
    (Schulman 2020, "Approximating KL Divergence", k3). For alarms: `answer_kl` falls below 0 where answers are drawn
    otherwise than their log-probabilities say, and no bound would ever be passed. r is held below e^5, so that one odd
    token is no alarm."""
    moved = (reference - logprobs).where(real, 0.0)  # log r
    return (moved.clamp(max=_LARGEST).exp() - 1 - moved.clamp(max=_LARGEST)).sum(dim=1)


def token_rewards(
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    scores: torch.Tensor,
    real: torch.Tensor,
    *,
    kl: float,
    clip: float | None,
) -> torch.Tensor:
    """[E, R]. scores: [E], one per answer; clip: they are held between plus and minus this. An answer without a token
    has nowhere to put its score and gets none."""
    rewards = (-kl * (logprobs - reference)).where(real, 0.0)
    bounded = scores if clip is None else scores.clamp(-clip, clip)
    lengths = real.sum(dim=1)
    answered = (lengths > 0).nonzero().squeeze(1)
    rewards[answered, lengths[answered] - 1] += bounded[answered].to(rewards.dtype)
    return rewards


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, real: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation, backwards over response tokens only: advantages and returns, [E, R] each.
    values: of the state before each token."""
    rewards, values = rewards.where(real, 0.0), values.where(real, 0.0)
    after = torch.zeros_like(rewards[:, 0])  # V_{t+1}
    carried = torch.zeros_like(after)  # advantage_{t+1}
    columns: list[torch.Tensor] = []
    for place in reversed(range(rewards.shape[1])):
        delta = rewards[:, place] + gamma * after - values[:, place]
        carried = (delta + gamma * lam * carried).where(real[:, place], 0.0)
        after = values[:, place]
        columns.append(carried)
    advantages = torch.stack(columns[::-1], dim=1)
    return advantages, (advantages + values).where(real, 0.0)


def whiten(values: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """To mean 0 and variance 1 over the real places; where all are the same, to 0. One that is no finite number makes
    all of them NaN: the guard must see it."""
    count = real.sum()
    mean = values.where(real, 0.0).sum() / count
    centred = (values - mean).where(real, 0.0)
    variance = centred.square().sum() / count
    # A spread of rounding errors alone is no spread: it must not be blown up to 1.
    least = (torch.finfo(values.dtype).eps * mean.abs()).square()
    scale = torch.where(variance <= least, 0.0, variance.rsqrt())  # NaN is no spread of rounding errors, and stays
    return (centred * scale).where(real, 0.0)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, real: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the real places: 1 for a perfect critic, 0 for a constant one; 0
    where the returns do not vary."""
    found, wanted = values[real].double(), returns[real].double()
    spread = wanted.var(correction=0)
    return float(1 - (wanted - found).var(correction=0) / spread) if spread > 0 else 0.0
