"""Engines with a full copy of the model: in one process (`SingleEngine`) or in each of several (`DdpEngine`).

Under DDP gradients are summed once per step, with one all-reduce. Losses are divided by the weight over all ranks
before `backward`, so gradients are summed and not averaged. The message holds the gradients in the order of the model's
parameters, on every rank and in every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.training.engine.base import ALL, Elements, Groups, Stepping, own_gradients
from surefoot.training.optimizer import Optimizer, trainable_parameters
from surefoot.training.optimizer_state import load_optimizer_tensors, optimizer_tensors
from surefoot.training.ranks import ALONE, Ranks, add_over_ranks, first_difference


class SingleEngine(Stepping):
    """The plain model in one process.

    groups: parameter groups; None puts all parameters into one.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        groups: Groups | None = None,
        ranks: Ranks = ALONE,
    ):
        device = next(iter(parameters.values())).device
        super().__init__(model, parameters, optimizer, groups or {ALL: parameters}, ranks, device)

    def grad_norms(self) -> dict[str, torch.Tensor]:
        return {name: nn.utils.get_total_norm(own_gradients(group)) for name, group in self.groups.items()}

    def gather_state(self) -> dict[str, torch.Tensor]:
        return optimizer_tensors(self.optimizer, self.stepped) if self.ranks.is_first else {}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_optimizer_tensors(self.optimizer, self.stepped, tensors)

    def gathered(self, frozen: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def elements(self) -> Elements:
        trained = sum(parameter.numel() for parameter in self.parameters.values())
        return Elements(sum(parameter.numel() for parameter in self.model.parameters()), trained, trained)


class DdpEngine(SingleEngine):
    """Data-parallel replicas. Raises EnvironmentFault if the ranks do not start with the same weights."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, groups: Groups, ranks: Ranks):
        super().__init__(model, trainable_parameters(model), optimizer, groups, ranks)
        _require_same({**dict(model.named_parameters()), **dict(model.named_buffers())}, ranks, "before the first step")

    def reduce(self) -> None:
        # What no rank has used gets no gradient, so that the optimizer skips it as in one process.
        used = self.totals([float(one.grad is not None) for one in self.parameters.values()])
        for parameter, ranks in zip(self.parameters.values(), used, strict=True):
            if parameter.grad is None and ranks:
                parameter.grad = torch.zeros_like(parameter)
        add_over_ranks([one.grad for one in self.parameters.values() if one.grad is not None], self.ranks)

    def check_replicas(self) -> None:
        # A rank with faulty memory or interconnect would otherwise silently diverge from the others.
        moments = optimizer_tensors(self.optimizer, self.parameters)
        _require_same({**self.parameters, **moments}, self.ranks, "after this step")


def _require_same(tensors: Mapping[str, torch.Tensor], ranks: Ranks, when: str) -> None:
    found = first_difference(tensors, ranks)
    if found is not None:
        odd = f"rank{'s' if len(found.odd) > 1 else ''} {', '.join(map(str, found.odd))}"
        others = "rank 0" if ranks.world == 2 else "the others"
        what = f"is not the same on all {ranks.world} ranks {when}: {odd} and {others} differ"
        fix = "give every rank the same files, libraries and kind of device; if they are the same, test the hardware"
        raise EnvironmentFault(Fault(found.name, what, fix, code="SF-RANKS-DIFFER"))
