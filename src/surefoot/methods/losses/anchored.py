"""ASFT: token losses weighted by probability, held near the model as it was before training.

    loss = sum over supervised t of  - p_t log p_t + kl * KL(q, p) at t
    KL(q, p) = sum over tokens of q (log q - log p)

p_t of the first term is a constant in the gradient, as in `dft`; q is the reference's next-token distribution (Zhu et
al. 2025, arXiv 2509.23753; LLaMA-Factory's `use_asft_loss`). Both models take the same way to their logits, so at the
start the divergence is exactly 0. Without gradients the loss is the cross entropy, as for the other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from surefoot.data.batching.batch import Batch
from surefoot.kernels.chunked_loss import summed, summed_over
from surefoot.kernels.divergence import Anchored, Whole
from surefoot.kernels.operands import operand_type
from surefoot.methods.losses.distill import Teacher, stand_in
from surefoot.methods.losses.sft import LOSSES, Constants, sft_loss, supervised_places
from surefoot.models.fast.chunked_head import chunked_head
from surefoot.models.forward import causal_model, hidden_at, logits_at
from surefoot.models.modes import inference_mode
from surefoot.planning.fast_paths import COMPARED_AT_ONCE
from surefoot.training.objective import LossSum, Objective


def anchored_loss(name: str, constants: Constants, reference: Teacher = stand_in) -> Objective:
    """Make the objective of a token loss with a reference.

    reference: its distributions at the supervised positions; the stand-in serves to compare fast paths.
    sums: "divergence" in training.
    """
    weight = LOSSES[name](constants)
    assert weight is not None

    def objective(model: nn.Module, batch: Batch) -> LossSum:
        if not torch.is_grad_enabled():
            return sft_loss(model, batch)
        places, targets = supervised_places(batch)
        # Before the policy: what the reference needs while it runs is free again when the activations exist.
        loss = Anchored(reference(batch, places), targets, weight=weight, kl=constants.kl)
        head = chunked_head(model)
        if head is None:
            total = summed_over(logits_at(model, batch, places), loss, COMPARED_AT_ONCE)
        else:
            total = summed(hidden_at(model, batch, places), head, loss)
        return LossSum(total, {"divergence": loss.divergence.sum()})

    return objective


def distributions(model: nn.Module, use: Callable[[], AbstractContextManager[object]] = nullcontext) -> Teacher:
    """Return the next-token distributions of a reference.

    model: its output head is computed in chunks where the fast path "loss" is installed in it.
    use: context in which it is the reference.
    """
    words = causal_model(model).config.get_text_config().vocab_size

    def of_rows(batch: Batch, places: torch.Tensor) -> Whole:
        with inference_mode(model), use():
            head = chunked_head(model)
            if head is None:
                return Whole(None, None, logits_at(model, batch, places), words)
            hidden = hidden_at(model, batch, places)
            # Here, under the policy's autocast: where it is compared, there is none.
            return Whole(hidden.to(operand_type(hidden.dtype, hidden.device)), head, None, words)

    return of_rows
