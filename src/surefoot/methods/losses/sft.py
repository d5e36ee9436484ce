"""Supervised fine-tuning: cross entropy of the tokens that the data marks as supervised.

    loss = - sum over supervised t of w_t log p_t,   p_t = softmax(logits_t)[target_t]

with one weight per token, a constant in the gradient:

    cross_entropy   w = 1
    dft             w = p                        Wu et al. 2025, arXiv 2508.05629
    eaft            w = (H / entropy)^alpha      EAFT; H: entropy in nats among the `top` likeliest tokens
    asft            w = p                        with a reference beside it, see `surefoot.methods.losses.anchored`

Weights are for training; without gradients the loss is the cross entropy, which other models' can be compared with. The
head runs only on supervised positions; softmax and sum are fp32 whatever the autocast dtype. With the chunked head
(`surefoot.models.fast.chunked_head`), the logits of all positions never exist at once.

`with_neftune` adds noise to the embeddings during training (Jain et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from surefoot.data.batching.batch import IGNORE, Batch, Weighted
from surefoot.kernels.chunked_loss import Head, TokenWeight, first_choices, summed_loss
from surefoot.method_facts.losses import TOKEN_LOSSES, joined
from surefoot.models.embeddings import noisy_embeddings
from surefoot.models.fast.chunked_head import chunked_head
from surefoot.models.forward import hidden_at, logits_at
from surefoot.training.objective import LossSum, Objective


@dataclass(frozen=True)
class Constants:
    """Constants of the formulas above, named as in the config's section `sft`."""

    alpha: float = 1.0
    top: int = 20
    entropy: float = 3.0
    kl: float = 0.1


def _dft(constants: Constants) -> TokenWeight:
    return lambda logits, log_p: log_p.exp()


def _eaft(constants: Constants) -> TokenWeight:
    def weight(logits: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
        likeliest = logits.topk(min(constants.top, logits.shape[1]), dim=1).values.log_softmax(dim=1)
        return (-(likeliest.exp() * likeliest).sum(dim=1, keepdim=True) / constants.entropy) ** constants.alpha

    return weight


LOSSES: Mapping[str, Callable[[Constants], TokenWeight | None]] = joined(
    TOKEN_LOSSES,
    {"cross_entropy": lambda constants: None, "dft": _dft, "eaft": _eaft, "asft": _dft},
    ("method_facts.losses.TOKEN_LOSSES", "methods.losses.sft.LOSSES"),
)


def token_loss(name: str, constants: Constants) -> Objective:
    """Make the objective of one of LOSSES that need no reference."""
    weight = LOSSES[name](constants)
    return sft_loss if weight is None else partial(sft_loss, weight=weight)


def sft_loss(model: nn.Module, batch: Batch, weight: TokenWeight | None = None) -> LossSum:
    """Summed cross entropy over `batch.targets` other than IGNORE; a batch with none gives 0, with gradients of 0.

    weight: of each token in training.
    sums: "correct", the number of supervised tokens that are the model's top-1 prediction. Counted only in evaluation
        (without gradients), because it costs a pass over the logits.
    """
    weight = weight if torch.is_grad_enabled() else None
    head = chunked_head(model)
    if head is not None:
        return _chunked_loss(model, batch, head, weight)
    logits, targets = supervised_logits(model, batch)
    with torch.autocast(logits.device.type, enabled=False):
        wide = logits.float()
        if weight is not None:
            return LossSum(_weighted(wide, targets, weight))
        loss = F.cross_entropy(wide, targets, reduction="sum")
    if torch.is_grad_enabled():
        return LossSum(loss)
    return LossSum(loss, {"correct": (logits.argmax(dim=-1) == targets).sum()})


def _weighted(logits: torch.Tensor, targets: torch.Tensor, weight: TokenWeight) -> torch.Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none")
    with torch.no_grad():
        weights = weight(logits, -losses.unsqueeze(1)).squeeze(1)
    return (weights * losses).sum()


def _chunked_loss(model: nn.Module, batch: Batch, head: Head, weight: TokenWeight | None) -> LossSum:
    places, targets = supervised_places(batch)
    hidden = hidden_at(model, batch, places)
    loss = summed_loss(hidden, head, targets, weight)
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

    def noisy(model: nn.Module, batch: Weighted) -> LossSum:
        rows = batch.rows
        if not model.training or not rows.lengths:  # an empty batch has no tokens
            return objective(model, batch)
        with noisy_embeddings(model, alpha, rows.documents or rows.lengths):
            return objective(model, batch)

    return noisy
