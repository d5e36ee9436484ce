"""Distillation: the divergence between the student's and the teacher's next-token distributions.

    loss = sum over supervised t of D(q(. | before t), p(. | before t)) + sft * cross entropy of target_t

D is forward KL, reverse KL or a generalized JSD (`surefoot.kernels.divergence`). Both distributions are compared a few
positions at a time. With the chunked head (`surefoot.models.fast.chunked_head`) neither model's logits of all positions
exist; without it the student's do.

Answers that the student has drawn itself (`DrawnBatch`) have no cross entropy: it would make likelier whatever was
drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from surefoot.data.batching.batch import Batch, DrawnBatch, Weighted
from surefoot.kernels.chunked_loss import summed, summed_over
from surefoot.kernels.divergence import Distillation, Known, Likeliest
from surefoot.methods.losses.sft import supervised_places
from surefoot.models.fast.chunked_head import chunked_head
from surefoot.models.forward import hidden_at, logits_at
from surefoot.planning.fast_paths import COMPARED_AT_ONCE
from surefoot.training.objective import LossSum, Objective

# Rows on the student's device, and their `supervised_places` -> what is known there.
Teacher = Callable[[Batch, torch.Tensor], Known]


@dataclass(frozen=True)
class DistillSettings:
    """beta, temperature: see `surefoot.kernels.divergence`. sft: weight of the cross entropy. draws: whether there are
    answers that the student has drawn."""

    beta: float
    temperature: float
    sft: float
    draws: bool = False


def distill_objective(settings: DistillSettings, teacher: Teacher) -> Objective:
    """Return the objective.

    sums: "divergence" where the loss has another part; "own_tokens", learned tokens of drawn answers, where there are
        some. In evaluation also "cross_entropy"; "correct", targets that are the student's likeliest token; and
        "agreement", positions where that is also the teacher's.
    """

    def objective(model: nn.Module, batch: Weighted) -> LossSum:
        rows, measures = batch.rows, not torch.is_grad_enabled()
        sft = 0.0 if isinstance(batch, DrawnBatch) else settings.sft
        # First: the index needs a host sync on a GPU, and the queue is shortest before the two forward passes. Then the
        # teacher: what it needs while it runs is free again when the student's activations exist.
        places, targets = supervised_places(rows)
        known = teacher(rows, places)
        loss = Distillation(
            known, targets, beta=settings.beta, temperature=settings.temperature, sft=sft, measures=measures
        )
        head = chunked_head(model)
        if head is None:
            total = summed_over(logits_at(model, rows, places), loss, COMPARED_AT_ONCE)
        else:
            total = summed(hidden_at(model, rows, places), head, loss)
        sums = {"divergence": loss.divergence.sum()} if settings.sft else {}
        if settings.draws and not measures:
            sums["own_tokens"] = total.new_full((), len(targets) if isinstance(batch, DrawnBatch) else 0).detach()
        if measures:
            sums |= {
                "cross_entropy": loss.cross_entropy.sum(),
                "agreement": loss.agrees.sum(),
                "correct": loss.correct.sum(),
            }
        return LossSum(total, sums)

    return objective


def stand_in(rows: Batch, places: torch.Tensor) -> Known:
    """A `Teacher` that gives every target a half. Fast paths are compared with it before the run's own is there."""
    targets = rows.targets.flatten().index_select(0, places)
    half = torch.full((len(targets),), 0.5, device=targets.device).log()
    return Likeliest(targets.unsqueeze(1), half.unsqueeze(1), half)
