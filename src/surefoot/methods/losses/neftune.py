"""NEFTune around any objective: the same loss of a model whose embedded tokens carry noise, in training only."""

from __future__ import annotations

from torch import nn

from surefoot.data.batch import Batch
from surefoot.models.embeddings import noisy_embeddings
from surefoot.training.objective import LossSum, Objective


def with_neftune(objective: Objective, alpha: float) -> Objective:
    """alpha: size of the noise; see `surefoot.models.embeddings`. Draws follow the seed of the micro-batch."""

    def noisy(model: nn.Module, batch: Batch) -> LossSum:
        if not model.training or not batch.lengths:  # a blank batch counts nothing
            return objective(model, batch)
        with noisy_embeddings(model, alpha, batch.documents or batch.lengths):
            return objective(model, batch)

    return noisy
