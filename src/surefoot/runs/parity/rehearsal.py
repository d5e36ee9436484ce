"""A pass before step 1 over batches that still lack what a stage makes before each step.

A policy that is held to a reference is its own: before its first step it is one, and numbers from anywhere else would
drive the loss to where it has no slope, so that nothing could be compared. KL estimates take any number where only
shapes, or two ways of computing the same, are looked at. Prompts have no answers yet; there the policy predicts the
prompts, and the critic is asked beside it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batch import JudgedBatch, PairBatch, PromptBatch, Weighted
from surefoot.methods.losses.logprobs import frozen
from surefoot.models.ppo_models import PPOModels
from surefoot.planning.plan import RunPlan
from surefoot.planning.reference import NONE
from surefoot.training.objective import LossSum, Objective


def rehearsal(objective: Objective, batch: Weighted, device: torch.device, plan: RunPlan) -> tuple[Objective, Weighted]:
    """The objective, or what stands in for it, and the batch with stand-ins for what it lacks, on the device."""
    batch = batch.to(device)
    if isinstance(batch, PromptBatch):
        return _prompts, batch
    if isinstance(batch, JudgedBatch) and batch.kl is None:
        batch = replace(batch, kl=0.0)
    if isinstance(batch, PairBatch | JudgedBatch) and batch.reference is None:
        batch = replace(batch, reference=torch.zeros(batch.rows.sequences, device=device))
        if plan.reference is not None and plan.reference.value != NONE:
            return _held_to_itself(objective), batch
    return objective, batch


def _held_to_itself(objective: Objective) -> Objective:
    def held(model: nn.Module, batch: PairBatch | JudgedBatch) -> LossSum:
        return objective(model, replace(batch, reference=frozen(model)(batch.rows)))

    return held


def _prompts(model: nn.Module, batch: PromptBatch) -> LossSum:
    """Cross entropy of each prompt's own tokens, plus the critic's values."""
    assert isinstance(model, PPOModels)
    ids = batch.rows.input_ids
    real = torch.arange(ids.shape[1], device=ids.device) < torch.tensor(batch.rows.lengths, device=ids.device)[:, None]
    next_is_real = F.pad(real[:, 1:], (0, 1))
    places = next_is_real.flatten().nonzero().squeeze(1)
    logits = model.actor_logits_at(batch.rows, places)
    targets = ids.flatten().index_select(0, places + 1)
    values = model.values(batch.rows)[real]
    return LossSum(F.cross_entropy(logits.float(), targets, reduction="sum") + values.float().sum())
