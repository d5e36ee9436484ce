"""The policy that another one is held to: log-probabilities of answers under it, without gradient.

A reference is a function from rows to numbers. `adapter_off` is the base under the policy's adapter and costs no
memory; `frozen` is a model of its own. Dropout is off in both: a reference is one distribution, not a draw. Otherwise
it runs as the policy does, inside the same autocast and with the same kernels, so that a policy that has not moved yet
differs from it by nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn

from surefoot.data.batch import Batch, JudgedBatch, PairBatch
from surefoot.methods.losses.logprobs import answer_logprobs
from surefoot.models.modes import eval_mode
from surefoot.models.peft import PeftModel
from surefoot.models.shared_backbone import SharedBackbone
from surefoot.training.objective import LossSum, Objective

Reference = Callable[[Batch], torch.Tensor]  # B rows on the model's device -> [B] fp32


def with_reference(objective: Objective, reference: Reference) -> Objective:
    """The objective, for batches whose reference log-probabilities are not known yet as well."""

    def known(model: nn.Module, batch: PairBatch | JudgedBatch) -> LossSum:
        if batch.reference is None:
            batch = replace(batch, reference=reference(batch.rows))
        return objective(model, batch)

    return known


def frozen(model: nn.Module) -> Reference:
    """Of a model as it is."""
    return _under(model, nullcontext)


def adapter_off(policy: PeftModel) -> Reference:
    """Of the base under the policy's adapter."""
    trunk = SharedBackbone(policy)
    return _under(policy, lambda: trunk.use_adapter(None))


def _under(model: nn.Module, context: Callable[[], AbstractContextManager[object]]) -> Reference:
    def reference(rows: Batch) -> torch.Tensor:
        with at_rest(model), context():
            return answer_logprobs(model, rows).sums

    return reference


@contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """Without gradients and dropout; afterwards the model's mode is what it was."""
    with eval_mode(model), torch.no_grad():
        yield
