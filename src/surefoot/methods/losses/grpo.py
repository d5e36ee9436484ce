"""The arithmetic of GRPO and its relatives: advantages of a group's answers, and the loss. No critic.

    A_i = (s_i - baseline) / (deviation + 1e-4)             baseline and deviation as the loss's row says

    r    = exp(log p - log p_old)                           of a token (ratio "token"),
           exp of its mean over an answer's tokens          ("sequence", GSPO),
           exp of its sum over an answer's tokens           ("answer", RLOO)
    l_t  = -min(r A, clip(r, 1 - low, 1 + high) A)          or, where the ratio weighs (CISPO),
           -sg(min(r, 1 + high)) A log p_t                  sg: no gradient
    k3_t = p_ref / p - 1 - log(p_ref / p)                   Schulman 2020, where the penalty is in the loss
    loss = sum over tokens of w_t (c_t l_t + kl * k3_t) / weight

    mean       w_t                    weight
    tokens     1                      tokens of the step
    answers    1 / tokens of its answer   answers of the step
    limit      1 / max_new_tokens     answers of the step

c_t corrects for the engine that drew the answers (`surefoot.methods.losses.mismatch`), 1 where nothing is corrected.
Sources stand in `surefoot.method_facts.losses.GROUP_LOSSES`. Everything is a sum that the step divides by the weight of
all micro-batches of all ranks, so the split never changes the result (trl#6439, prime-rl#2562, OpenRLHF#1249).

Shapes: N response tokens of a batch, V vocabulary, B answers of it; P groups of G answers in a rollout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from surefoot.data.batching.batch import IGNORE, Batch
from surefoot.data.batching.groups import GroupBatch
from surefoot.method_facts.losses import GroupLossFacts
from surefoot.methods.losses.mismatch import kept_alone
from surefoot.methods.losses.ppo import chosen_logprobs, entropy_seen, log_distribution
from surefoot.training.objective import LossSum, Objective

Logits = Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]]  # [N, V] at the answers' places, targets [N]
_LEAST = 1e-4  # added to a deviation, as in the published code


@dataclass(frozen=True)
class GroupSettings:
    """The constants of a loss of stage grpo.

    facts: of the loss.
    clip_low, clip_high: how far a ratio may go below and above 1; low None: as far as it likes.
    kl: coefficient of the penalty in the loss; 0 where it is in the score, or there is none.
    temperature: at which the answers were drawn.
    limit: longest answer in tokens.
    """

    facts: GroupLossFacts
    clip_low: float | None
    clip_high: float
    kl: float
    temperature: float
    limit: int


def group_objective(settings: GroupSettings, policy: Logits) -> Objective:
    """The loss as an objective for `GroupBatch`.

    policy: how the step's model is asked for logits.
    """

    def group_loss(model: nn.Module, batch: GroupBatch) -> LossSum:
        """Summed as above. sums, each a mean over the answers' tokens once divided by the weight: entropy, ratio,
        clip_low, clip_high (shares cut), approx_kl of the old policy from the new one, and kl where it is in the
        loss."""
        logits, targets = policy(model, batch.rows)
        with torch.autocast(logits.device.type, enabled=False):
            everything = kept_alone(log_distribution(logits, settings.temperature), batch.kept)
            found = group_terms(settings, chosen_logprobs(everything, targets), batch)
            entropy = entropy_seen(everything, found.share)
        return LossSum(found.loss, {"entropy": entropy, **found.sums})

    return group_loss


@dataclass(frozen=True)
class GroupTerms:
    """Of a batch: its summed loss, the sums that are logged, and what each token counts for among them, [N]."""

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    share: torch.Tensor


def group_terms(settings: GroupSettings, logprobs: torch.Tensor, batch: GroupBatch) -> GroupTerms:
    """logprobs: of the answers' tokens, [N], differentiable."""
    facts = settings.facts
    answer = answers_of(batch.rows)
    counts = logprobs.new_zeros(len(batch.counted)).index_add_(0, answer, torch.ones_like(logprobs))
    counted, length = batch.counted[answer], counts[answer]
    share = counted if facts.mean == "tokens" else counted / length
    weight = share if facts.mean != "limit" else counted / settings.limit
    moved = logprobs - batch.old_logprobs
    ratio = _ratio(facts, moved, answer, counts)
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
        terms = terms + settings.kl * penalty
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


def _ratio(facts: GroupLossFacts, moved: torch.Tensor, answer: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Of each token, [N]; tokens of one answer share theirs where it is the answer's."""
    if facts.ratio == "token":
        return moved.exp()
    sums = torch.zeros_like(counts).index_add(0, answer, moved)
    return (sums / counts.clamp(min=1) if facts.ratio == "sequence" else sums).exp()[answer]


def answers_of(rows: Batch) -> torch.Tensor:
    """[N]: in which row each of the answers' tokens stands."""
    return (rows.targets != IGNORE).nonzero()[:, 0]


def group_advantages(scores: torch.Tensor, facts: GroupLossFacts) -> torch.Tensor:
    """Of every answer, [P, G] in fp64.

    scores: [P, G]; not finite where an answer has none: it is left out of baseline and deviation, and gets 0.
    facts: whose baseline and scale are taken.

    An answer with nothing to compare it with gets 0.
    """
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
        found = found / (_deviation(values, known, own) + _LEAST)
    elif facts.scale == "step":
        every = known.sum()
        spread = _deviation(values.reshape(1, -1), known.reshape(1, -1), every.reshape(1, 1))
        found = found / (spread + _LEAST)
    return found.where(known & compared, 0.0)


def _deviation(values: torch.Tensor, known: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Of each row's known values, with n - 1 in the denominator; 0 for a single one."""
    mean = values.sum(dim=1, keepdim=True) / count.clamp(min=1)
    squares = (values - mean).where(known, 0.0).square().sum(dim=1, keepdim=True)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def pass_at_k(passed: torch.Tensor, drawn: torch.Tensor, k: int) -> float:
    """The chance that one of k answers passes, a mean over prompts (Chen et al. 2021, equation 1), unbiased:

        1 - C(n - c, k) / C(n, k)    n answers drawn, c of them passed

    passed, drawn: [P]. A prompt with fewer than k answers is left out; NaN where all are.
    """
    chances = [
        1 - math.comb(n - c, k) / math.comb(n, k)
        for c, n in zip(passed.tolist(), drawn.tolist(), strict=True)
        if n >= k
    ]
    return math.fsum(chances) / len(chances) if chances else math.nan


def without_spread(scores: torch.Tensor) -> torch.Tensor:
    """[P, G] -> [P] bool: groups whose known scores are all the same, so that nothing can be learned from them."""
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


def penalised(
    scores: torch.Tensor, logprobs: torch.Tensor, reference: torch.Tensor, real: torch.Tensor, kl: float
) -> torch.Tensor:
    """Scores less kl times the answer's sum of log p - log p_ref, where the penalty is in the score.

    scores: [E]. logprobs, reference, real: [E, R], R tokens of the longest answer.
    """
    return scores - kl * (logprobs - reference).where(real, 0.0).double().sum(dim=1)
