"""Supervised fine-tuning: cross entropy of the tokens that the data marks as supervised.

    loss = - sum over supervised t of log softmax(logits_t)[target_t]

The head runs only on supervised positions; softmax and sum are fp32 whatever the autocast dtype. With the chunked head
(`surefoot.models.fast.chunked_head`), the logits of all positions never exist at once.

`with_neftune` adds noise to the embeddings during training (Jain et al. 2023).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batching.batch import IGNORE, Batch
from surefoot.kernels.chunked_loss import Head, first_choices, summed_loss
from surefoot.models.embeddings import noisy_embeddings
from surefoot.models.fast.chunked_head import chunked_head
from surefoot.models.forward import hidden_at, logits_at
from surefoot.training.objective import LossSum, Objective


def sft_loss(model: nn.Module, batch: Batch) -> LossSum:
    """Summed cross entropy over `batch.targets` other than IGNORE; a batch with none gives 0, with gradients of 0.

    sums: "correct", the number of supervised tokens that are the model's top-1 prediction. Counted only in evaluation
        (without gradients), because it costs a pass over the logits.
    """
    head = chunked_head(model)
    if head is not None:
        return _chunked_loss(model, batch, head)
    logits, targets = supervised_logits(model, batch)
    with torch.autocast(logits.device.type, enabled=False):
        loss = F.cross_entropy(logits.float(), targets, reduction="sum")
    if torch.is_grad_enabled():
        return LossSum(loss)
    return LossSum(loss, {"correct": (logits.argmax(dim=-1) == targets).sum()})


def _chunked_loss(model: nn.Module, batch: Batch, head: Head) -> LossSum:
    places, targets = supervised_places(batch)
    hidden = hidden_at(model, batch, places)
    loss = summed_loss(hidden, head, targets)
    if torch.is_grad_enabled():
        return LossSum(loss)
    return LossSum(loss, {"correct": (first_choices(hidden, head) == targets).sum()})


def supervised_logits(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [N, V] at the positions whose next token is supervised, and those tokens [N]."""
    # First, because the index needs a host sync on a GPU, and the kernel queue is shortest before the decoder runs.
    places, targets = supervised_places(batch)
    return logits_at(model, batch, places), targets


def supervised_places(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices [N] into the B * T positions whose next token is supervised, and those tokens [N]."""
    places = (batch.targets.flatten() != IGNORE).nonzero().squeeze(1)
    return places, batch.targets.flatten().index_select(0, places)


def with_neftune(objective: Objective, alpha: float) -> Objective:
    """Wrap the objective to add noise to the embeddings of training batches.

    alpha: scale of the noise; see `surefoot.models.embeddings`. It is drawn from the seed of the micro-batch.
    """

    def noisy(model: nn.Module, batch: Batch) -> LossSum:
        if not model.training or not batch.lengths:  # an empty batch has no tokens
            return objective(model, batch)
        with noisy_embeddings(model, alpha, batch.documents or batch.lengths):
            return objective(model, batch)

    return noisy
