"""KTO: learning from single answers labeled good or bad (Ethayarajh et al. 2024).

With g = log p(y|x) - log q(y|x) between policy p and reference q, and s the logistic function, the loss of an answer is

    good   w_good (1 - s(b (g - z)))          bad   w_bad (1 - s(b (z - g)))        1 - s(x) = s(-x)

z is the KL divergence of policy from reference, estimated as max(0, mean of g over prompts with answers to other
prompts), without gradient. It is one number per optimizer step: estimated per micro-batch, as other tools do, it would
make the loss depend on how the step is split.

`sums` are means over the good and over the bad answers of the step: reward_good, reward_bad (b g), their difference
reward_margin, logp_good, logp_bad, and kl. A step without good or without bad answers lacks the names that would need
them. reward_accuracy: fraction of answers on the right side of z, good ones above and bad ones below; a tie counts one
half.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from surefoot.data.batching.batch import JudgedBatch
from surefoot.methods.losses.logprobs import answer_logprobs
from surefoot.training.objective import LossSum, Objective


@dataclass(frozen=True)
class Weights:
    """Constants of KTO's loss.

    beta: b above.
    good, bad: w_good and w_bad above.
    """

    beta: float
    good: float = 1.0
    bad: float = 1.0


def kto_loss(weights: Weights) -> Objective:
    """Make the objective for JudgedBatch, whose reference and KL must be set."""

    def objective(model: nn.Module, batch: JudgedBatch) -> LossSum:
        """Summed over answers."""
        if batch.reference is None or batch.kl is None:
            raise ValueError("KTO compares with a reference, and the batch lacks its log-probabilities or the KL term")
        logp = answer_logprobs(model, batch.rows).sums
        ratio = logp - batch.reference
        loss = answer_losses(ratio, batch.good, batch.kl, weights).sum()
        with torch.no_grad():
            return LossSum(loss, _sums(batch, logp.detach(), ratio.detach(), weights.beta))

    return objective


def answer_losses(ratio: torch.Tensor, good: torch.Tensor, kl: float, weights: Weights) -> torch.Tensor:
    """Loss of each answer, [B].

    ratio: log p/q, [B].
    good: [B] bool.
    """
    scaled = weights.beta * (ratio - kl)
    return torch.where(good, weights.good * torch.sigmoid(-scaled), weights.bad * torch.sigmoid(scaled))


def _sums(batch: JudgedBatch, logp: torch.Tensor, ratio: torch.Tensor, beta: float) -> dict[str, torch.Tensor]:
    assert batch.kl is not None
    above = (ratio > batch.kl).float() + 0.5 * (ratio == batch.kl).float()
    found = {
        "reward_accuracy": torch.where(batch.good, above, 1 - above).sum(),
        "kl": torch.full_like(ratio, batch.kl).sum(),
    }
    # The step divides sums by the number of all answers; the share turns this into a mean over the good or the bad.
    for name, chosen, share in (("good", batch.good, batch.good_share), ("bad", ~batch.good, batch.bad_share)):
        if share:
            found[f"reward_{name}"] = share * beta * (ratio * chosen).sum()
            found[f"logp_{name}"] = share * (logp * chosen).sum()
    if batch.good_share and batch.bad_share:
        found["reward_margin"] = found["reward_good"] - found["reward_bad"]
    return found
