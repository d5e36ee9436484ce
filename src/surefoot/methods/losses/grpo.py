"""Advantages and losses of GRPO and its relatives. No critic.

    A_i = (s_i - baseline) / (deviation + 1e-4)             baseline and deviation as in the loss's row

    r    = exp(log p - log p_old)                           of a token (ratio "token"),
           exp of its mean over an answer's tokens          ("sequence", GSPO),
           exp of its sum over an answer's tokens           ("answer", RLOO)
    l_t  = -min(r A, clip(r, 1 - low, 1 + high) A)          or, if the ratio is a weight (CISPO),
           -sg(min(r, 1 + high)) A log p_t                  sg: stop gradient
    k3_t = p_ref / p - 1 - log(p_ref / p)                   Schulman 2020, if the penalty is in the loss
    loss = sum over tokens of w_t (c_t l_t + kl * k3_t) / weight

    mean       w_t                    weight
    tokens     1                      tokens of the step
    answers    1 / tokens of its answer   answers of the step
    limit      1 / max_new_tokens     answers of the step

With `kl_by_ratio` k3_t is multiplied by r: the gradient of r k3 is that of the KL of the current policy, whoever drew
the answers, where that of k3 alone is so only for answers of its own.

c_t is the importance weight of the sampling engine (`surefoot.methods.losses.mismatch`), 1 without a correction.
Sources are in `surefoot.method_facts.losses.GROUP_LOSSES`. Everything is a sum that the step divides by the weight of
all micro-batches of all ranks, so the result does not depend on the split (trl#6439, prime-rl#2562, OpenRLHF#1249).

Shapes: N response tokens of a batch, V vocabulary, B answers of a batch; P groups of G answers in a rollout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.data.batching.batch import IGNORE, Batch
from surefoot.data.batching.groups import GroupBatch
from surefoot.method_facts.losses import GroupLossFacts
from surefoot.methods.losses.logprobs import drawn_logprobs
from surefoot.training.objective import LossSum, Objective

_EPS = 1e-4  # added to a deviation, as in the published code


@dataclass(frozen=True)
class GroupSettings:
    """Constants of a loss of stage grpo.

    facts: facts of the loss.
    clip_low, clip_high: maximum distance of a ratio below and above 1; None: unlimited.
    kl: coefficient of the penalty in the loss; 0 if it is in the score, or there is none.
    kl_by_ratio: whether the penalty of a token is multiplied by its unclipped ratio.
    temperature: sampling temperature of the answers.
    limit: maximum length of an answer in tokens.
    """

    facts: GroupLossFacts
    clip_low: float | None
    clip_high: float
    kl: float
    temperature: float
    limit: int
    kl_by_ratio: bool = False


def group_objective(settings: GroupSettings) -> Objective:
    """Make the loss as an objective for `GroupBatch`."""

    def group_loss(model: nn.Module, batch: GroupBatch) -> LossSum:
        """Sum the loss as defined above. sums, each a mean over the answers' tokens once divided by the weight:
        entropy, ratio, clip_low, clip_high (fractions clipped), approx_kl of the old policy from the new one, and kl if
        it is in the loss."""
        drawn = drawn_logprobs(model, batch.rows, settings.temperature, batch.kept)
        with torch.autocast(drawn.tokens.device.type, enabled=False):
            found = group_terms(settings, drawn.tokens, batch)
        entropy = {} if drawn.entropy is None else {"entropy": (drawn.entropy * found.share).sum()}
        return LossSum(found.loss, {**entropy, **found.sums})

    return group_loss


@dataclass(frozen=True)
class GroupTerms:
    """A batch's summed loss, the logged sums, and the weight of each token in them, [N]."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    share: torch.Tensor


def group_terms(settings: GroupSettings, logprobs: torch.Tensor, batch: GroupBatch) -> GroupTerms:
    """Compute loss and sums. logprobs: log-probabilities of the answers' tokens, [N], differentiable."""
    facts = settings.facts
    answer, position = answer_places(batch.rows)
    # Whole numbers: their sum is the same in any order.
    counts = logprobs.new_zeros(len(batch.counted)).index_add_(0, answer, torch.ones_like(logprobs))
    counted, length = batch.counted[answer], counts[answer]
    share = counted if facts.mean == "tokens" else counted / length
    weight = share if facts.mean != "limit" else counted / settings.limit
    moved = logprobs - batch.old_logprobs
    ratio = moved.exp()
    if facts.ratio != "token":
        # Summed by rows: `index_add` by answer has no fixed order on a GPU.
        by_answer = moved.new_zeros(batch.rows.targets.shape).index_put((answer, position), moved).sum(dim=1)
        # All tokens of an answer have the same ratio.
        ratio = (by_answer / counts.clamp(min=1) if facts.ratio == "sequence" else by_answer).exp()[answer]
    advantages = batch.advantages
    high = ratio.clamp(max=1 + settings.clip_high)
    if facts.weighs:
        terms = -high.detach() * advantages * logprobs
    else:
        near = high if settings.clip_low is None else high.clamp(min=1 - settings.clip_low)
        terms = -torch.min(ratio * advantages, near * advantages)
    if batch.weights is not None:
        terms = terms * batch.weights
    sums: dict[str, torch.Tensor] = {}
    if settings.kl > 0:
        assert batch.reference is not None, "a penalty in the loss needs the reference's log-probabilities"
        apart = batch.reference - logprobs
        penalty = apart.exp() - 1 - apart
        terms = terms + settings.kl * (penalty * ratio if settings.kl_by_ratio else penalty)
        sums["kl"] = (share * penalty).sum()
    with torch.no_grad():
        low = torch.zeros_like(ratio) if settings.clip_low is None else (ratio < 1 - settings.clip_low).float()
        sums |= {
            "ratio": (share * ratio).sum(),
            "clip_low": (share * low * (advantages < 0)).sum(),
            "clip_high": (share * (ratio > 1 + settings.clip_high) * (advantages > 0)).sum(),
            "approx_kl": (share * (moved.exp() - 1 - moved)).sum(),
        }
    return GroupTerms((weight * terms).sum(), {name: one.detach() for name, one in sums.items()}, share)


def answer_places(rows: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of each response token, both [N]."""
    row, column = (rows.targets != IGNORE).nonzero(as_tuple=True)
    return row, column


def group_advantages(scores: torch.Tensor, facts: GroupLossFacts) -> torch.Tensor:
    """Return the advantage of every answer, [P, G] in fp64.

    scores: [P, G]; not finite if an answer has none: it is excluded from baseline and deviation, and gets 0.
    facts: defines baseline and scale.

    An answer without others to compare with gets 0.
    """
    # A large score in common would cancel in fp32, and what is left is divided by a small deviation.
    scores = scores.double()
    known = scores.isfinite()
    values = scores.where(known, 0.0)
    own = known.sum(dim=1, keepdim=True)
    together = values.sum(dim=1, keepdim=True)
    if facts.baseline == "others":
        baseline = (together - values) / (own - 1).clamp(min=1)
        compared = own > 1
    elif facts.baseline == "group":
        baseline, compared = together / own.clamp(min=1), own > 1
    else:
        baseline, compared = values.sum() / known.sum().clamp(min=1), known.sum() > 1
    found = values - baseline
    if facts.scale == "group":
        found = found / (_deviation(values, known, own) + _EPS)
    elif facts.scale == "step":
        every = known.sum()
        spread = _deviation(values.reshape(1, -1), known.reshape(1, -1), every.reshape(1, 1))
        found = found / (spread + _EPS)
    return found.where(known & compared, 0.0)


def _deviation(values: torch.Tensor, known: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each row's known values, with n - 1 in the denominator; 0 for a single value."""
    mean = values.sum(dim=1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).where(known, 0.0).square().sum(dim=1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def chances_at_k(passed: torch.Tensor, drawn: torch.Tensor, k: int) -> list[float]:
    """The chance of each prompt that one of k answers passes (Chen et al. 2021, equation 1), unbiased:

        1 - C(n - c, k) / C(n, k)    n answers drawn, c of them passed

    passed, drawn: [P]. A prompt with fewer than k answers is left out.
    """
    return [
        1 - math.comb(n - c, k) / math.comb(n, k)
        for c, n in zip(passed.tolist(), drawn.tolist(), strict=True)
        if n >= k
    ]


def pass_at_k(passed: torch.Tensor, drawn: torch.Tensor, k: int) -> float:
    """The mean of `chances_at_k`; NaN where no prompt has k answers."""
    chances = chances_at_k(passed, drawn, k)
    return math.fsum(chances) / len(chances) if chances else math.nan


def without_spread(scores: torch.Tensor) -> torch.Tensor:
    """[P, G] -> [P] bool: groups whose known scores are all equal, from which nothing can be learned."""
    known = scores.isfinite()
    top = scores.where(known, -torch.inf).max(dim=1).values
    bottom = scores.where(known, torch.inf).min(dim=1).values
    return (known.sum(dim=1) < 2) | (top == bottom)


def overlong_penalty(lengths: torch.Tensor, limit: int, buffer: int) -> torch.Tensor:
    """DAPO's soft penalty of long answers, [E] fp64 (Yu et al. 2025, equation 13):

        0                                  up to limit - buffer tokens
        (limit - buffer - length) / buffer beyond, down to -1 at the limit

    lengths: [E], in tokens.
    """
    return ((limit - buffer - lengths.double()) / buffer).clamp(min=-1.0, max=0.0)


def penalized(
    scores: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor, real: torch.Tensor, kl: float
) -> torch.Tensor:
    """Subtract kl times the sum of log p - log p_ref over the answer, if the penalty is in the score.

    scores: [E]. logprobs, reference, real: [E, R], R tokens of the longest answer.
    """
    return scores - kl * (logprobs - reference).where(real, 0.0).double().sum(dim=1)
