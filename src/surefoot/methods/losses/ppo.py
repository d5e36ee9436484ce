"""Proximal policy optimisation: a policy that does more of what was better than expected, in small steps.

    ratio  = exp(log p - log p_old)
    policy = sum over response tokens of max(-A * ratio, -A * clip(ratio, 1 ± ratio_clip))
    value  = sum of 0.5 * max((V - R)^2, (clip(V, V_old ± value_clip) - R)^2)
    loss   = policy + value - entropy * H(p) + unsup * (cross entropy of texts)

(Schulman et al. 2017; Stiennon et al. 2020; DeepSpeed-Chat's forms and constants.) Policy and critic have no parameter
in common, so their losses add up without weighing against each other.

Shapes: N response tokens of a batch, V vocabulary, B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batch import IGNORE, Batch
from surefoot.data.episodes import PpoBatch
from surefoot.training.objective import LossSum, Objective

Logits = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]  # [N, V] at supervised places, targets [N]
Values = Callable[[Any, Batch], torch.Tensor]  # of the state before every token: [B, T] fp32

_ROWS = (
    32  # whose probabilities exist at once where the entropy is only logged: 4 MiB at 32 k words, which a cache holds
)


@dataclass(frozen=True)
class PpoSettings:
    """ratio_clip, value_clip: see above; a value_clip of None lets values move freely. entropy, unsup: coefficients.
    temperature: at which the answers were drawn; the policy that is improved is the one that draws."""

    ratio_clip: float
    value_clip: float | None
    entropy: float = 0.0
    unsup: float = 0.0
    temperature: float = 1.0


def ppo_objective(settings: PpoSettings, actor: Logits, critic: Values) -> Objective:
    """actor, critic: how the step's model is asked for the policy's logits and for the critic's values."""

    def ppo_loss(model: nn.Module, batch: PpoBatch) -> LossSum:
        """Summed over response tokens. sums: policy_loss, value_loss, entropy, ratio, clip_fraction, approx_kl (of the
        old policy from the new one), each to be divided by the response tokens; text_loss where texts are mixed in."""
        logits, targets = actor(model, batch.rows)
        values = at_places(critic(model, batch.rows), batch.rows)
        with torch.autocast(logits.device.type, enabled=False):
            everything = log_distribution(logits, settings.temperature)
            logprobs = chosen_logprobs(everything, targets)
            entropy = token_entropy(everything).sum() if settings.entropy > 0 else entropy_seen(everything)
            policy, sums = policy_loss(logprobs, batch.old_logprobs, batch.advantages, settings.ratio_clip)
            value = value_loss(values.float(), batch.old_values, batch.returns, settings.value_clip)
            loss = policy + value - settings.entropy * entropy
            found = {"policy_loss": policy, "value_loss": value, "entropy": entropy, **sums}
        if settings.unsup > 0:  # every batch reports it, also one without a text: ranks add up the same names
            text = policy * 0 if batch.text is None else _text_loss(model, batch.text, actor) * batch.text_share
            loss, found["text_loss"] = loss + settings.unsup * text, text
        return LossSum(loss, {name: sum_.detach() for name, sum_ in found.items()})

    return ppo_loss


def policy_loss(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, clip: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The clipped loss summed, and the sums of ratio, clip_fraction and approx_kl; all arguments [N]."""
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
    """Summed; all arguments [N]."""
    free = (values - returns).square()
    if clip is None:
        return 0.5 * free.sum()
    near = old + (values - old).clamp(-clip, clip)
    return 0.5 * torch.max(free, (near - returns).square()).sum()


def log_distribution(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """log p of every token at every place, [N, V], in fp32 or what is wider."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return (wide if temperature == 1 else wide / temperature).log_softmax(dim=-1)


def chosen_logprobs(log_p: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[N, V], [N] -> log p of each target, [N]."""
    return log_p.gather(1, targets[:, None]).squeeze(1)


def token_entropy(log_p: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N], in nats."""
    return -(log_p.exp() * log_p).sum(dim=-1)


@torch.no_grad()
def entropy_seen(log_p: torch.Tensor) -> torch.Tensor:
    """Sum of `token_entropy` to be logged, not learned: a few rows at a time, so that no second [N, V] exists."""
    return torch.stack([token_entropy(rows).sum() for rows in log_p.split(_ROWS)]).sum()


def at_places(values: torch.Tensor, batch: Batch) -> torch.Tensor:
    """[B, T] -> [N]: at the positions whose next token is supervised, row by row."""
    return values.flatten()[batch.targets.flatten() != IGNORE]


def _text_loss(model: nn.Module, text: Batch, actor: Logits) -> torch.Tensor:
    logits, targets = actor(model, text)
    with torch.autocast(logits.device.type, enabled=False):
        return F.cross_entropy(logits.float(), targets, reduction="sum")
