"""Proximal policy optimization: rewards, advantages, the KL coefficient and the loss.

    reward_t    = -kl * (log p(t) - log p_ref(t)), and at the last token also the clipped score of the answer
    delta_t     = reward_t + gamma * V_{t+1} - V_t          V after the last token is 0
    advantage_t = delta_t + gamma * lambda * advantage_{t+1}
    return_t    = advantage_t + V_t

    ratio  = exp(log p - log p_old)
    policy = sum over response tokens of max(-A * ratio, -A * clip(ratio, 1 ± ratio_clip))
    value  = sum of 0.5 * max((V - R)^2, (clip(V, V_old ± value_clip) - R)^2)
    loss   = policy + value - entropy * H(p) + unsup * (cross entropy of texts)

    e       = clip(KL / target - 1, ±0.2)                    the coefficient rises while the KL is above its target
    next kl = kl * (1 + e * answers / horizon)

(Schulman et al. 2016 and 2017; Ziegler et al. 2019; Stiennon et al. 2020; with DeepSpeed-Chat's form and constants.)
Policy and critic share no parameters, so their losses can simply be added. The score is added to the last token of the
answer; DeepSpeed-Chat's code adds it one token later if an answer ends before the limit.

Shapes: N response tokens of a batch, V vocabulary, B rows, T tokens of the longest row. E episodes (answers), R tokens
of the longest one: tables [E, R] begin with the answer's first token, and `real` is True at its tokens. Values in other
columns are ignored, and come out as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batching.batch import IGNORE, Batch
from surefoot.data.batching.rollouts import PpoBatch
from surefoot.methods.losses.logprobs import chosen_logprobs, entropies, log_distribution, token_entropy
from surefoot.training.objective import LossSum, Objective

Logits = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]  # [N, V] at supervised positions, targets [N]
Values = Callable[[Any, Batch], torch.Tensor]  # values of the state before every token: [B, T] fp32


@dataclass(frozen=True)
class PpoSettings:
    """Constants of PPO's loss.

    ratio_clip, value_clip: see above; value_clip None: unclipped.
    entropy, unsup: coefficients.
    temperature: sampling temperature of the answers; the optimized policy is the sampling one.
    """

    ratio_clip: float
    value_clip: float | None
    entropy: float = 0.0
    unsup: float = 0.0
    temperature: float = 1.0


def ppo_objective(settings: PpoSettings, actor: Logits, critic: Values) -> Objective:
    """Make PPO's loss as an objective for `PpoBatch`.

    actor, critic: compute the policy's logits and the critic's values with the step's model.
    """

    def ppo_loss(model: nn.Module, batch: PpoBatch) -> LossSum:
        """Summed over response tokens. sums: policy_loss, value_loss, entropy, ratio, clip_fraction, approx_kl (of the
        old policy from the new one), each to be divided by the response tokens; text_loss if texts are mixed in."""
        logits, targets = actor(model, batch.rows)
        values = at_places(critic(model, batch.rows), batch.rows)
        with torch.autocast(logits.device.type, enabled=False):
            everything = log_distribution(logits, settings.temperature)
            logprobs = chosen_logprobs(everything, targets)
            entropy = (token_entropy if settings.entropy > 0 else entropies)(everything).sum()
            policy, sums = policy_loss(logprobs, batch.old_logprobs, batch.advantages, settings.ratio_clip)
            value = value_loss(values.float(), batch.old_values, batch.returns, settings.value_clip)
            loss = policy + value - settings.entropy * entropy
            found = {"policy_loss": policy, "value_loss": value, "entropy": entropy, **sums}
        if settings.unsup > 0:  # reported by every batch, also without a text: ranks must add up the same names
            text = policy * 0 if batch.text is None else _text_loss(model, batch.text, actor) * batch.text_share
            loss, found["text_loss"] = loss + settings.unsup * text, text
        return LossSum(loss, {name: sum_.detach() for name, sum_ in found.items()})

    return ppo_loss


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the summed clipped loss, and the sums of ratio, clip_fraction and approx_kl; all arguments [N]."""
    moved = logprobs - old
    ratio = moved.exp()
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip)
    with torch.no_grad():
        sums = {
            "ratio": ratio.sum(),
            "clip_fraction": (clipped > free).sum(),
            "approx_kl": (ratio - 1 - moved).sum(),  # never negative; Schulman 2020, "k3"
        }
    return torch.max(free, clipped).sum(), sums


def value_loss(values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None) -> torch.Tensor:
    """Return the summed clipped value loss; all arguments [N]."""
    free = (values - returns).square()
    if clip is None:
        return 0.5 * free.sum()
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.max(free, (near - returns).square()).sum()


def at_places(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Select the positions whose next token is supervised, row by row: [B, T] -> [N]."""
    return values.flatten()[batch.targets.flatten() != IGNORE]


def _text_loss(model: nn.Module, text: Batch, actor: Logits) -> torch.Tensor:
    logits, targets = actor(model, text)
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits.float(), targets, reduction="sum")


_LARGEST = 5.0  # largest log ratio that an estimate of distance counts


def response_mask(lengths: torch.Tensor, width: int) -> torch.Tensor:
    """Return True at each answer's tokens: lengths [E] -> [E, width]."""
    return torch.arange(width, device=lengths.device)[None, :] < lengths[:, None]


def answer_kl(logprobs: torch.Tensor, reference: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the sum over each answer of log p - log p_ref, [E]. Its mean estimates the KL of the policy from the
    reference; for a single answer it can be negative."""
    return (logprobs - reference).where(real, 0.0).sum(dim=1)


def answer_distance(logprobs: torch.Tensor, reference: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Return the sum over each answer of r - 1 - log r with r = p_ref / p, [E], which is never negative and estimates
    the same KL (Schulman 2020, "Approximating KL Divergence", k3). Used for alarms: `answer_kl` falls below 0 if
    answers are sampled differently from their log-probabilities, and would never exceed a bound. r is limited to e^5,
    so that a single unusual token is no alarm."""
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
    """Return the reward of every token, [E, R].

    scores: [E], one per answer. The score of an empty answer is dropped.
    clip: limit of the absolute score; None: none.
    """
    rewards = (-kl * (logprobs - reference)).where(real, 0.0)
    bounded = scores if clip is None else scores.clamp(-clip, clip)
    lengths = real.sum(dim=1)
    answered = (lengths > 0).nonzero().squeeze(1)
    # Only answers with a token: index -1 of an empty one would be the last column.
    rewards[answered, lengths[answered] - 1] += bounded[answered].to(rewards.dtype)
    return rewards


def advantages_and_returns(
    rewards: torch.Tensor, values: torch.Tensor, real: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation over response tokens: returns advantages and returns, [E, R] each.

    values: value of the state before each token.
    """
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
    """Normalize to mean 0 and variance 1 over the real positions; to 0 if all are equal. A non-finite value makes all
    of them NaN, so that the guard sees it."""
    count = real.sum()
    mean = values.where(real, 0.0).sum() / count
    centered = (values - mean).where(real, 0.0)
    variance = centered.square().sum() / count
    # A variance of rounding errors must not be scaled to 1.
    least = (torch.finfo(values.dtype).eps * mean.abs()).square()
    scale = torch.where(variance <= least, 0.0, variance.rsqrt())  # NaN stays NaN
    return (centered * scale).where(real, 0.0)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, real: torch.Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the real positions: 1 for a perfect critic, 0 for a constant
    one, and 0 if the returns do not vary."""
    found, wanted = values[real].double(), returns[real].double()
    spread = wanted.var(correction=0)
    return float(1 - (wanted - found).var(correction=0) / spread) if spread > 0 else 0.0


_MOST = 0.2  # limit of the relative error, from the paper


def next_coefficient(now: float, kl: float, *, target: float | None, horizon: float, answers: int) -> float:
    """Return the KL coefficient of the next rollout.

    kl: mean KL per answer of the last rollout, with `answers` answers.
    target: None leaves the coefficient unchanged.

    The factor is never negative: a rollout of at least five horizons can at most set the coefficient to 0.
    """
    if target is None:
        return now
    error = min(max(kl / target - 1, -_MOST), _MOST)
    return now * max(0.0, 1 + error * answers / horizon)
