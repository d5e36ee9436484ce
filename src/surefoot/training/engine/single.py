"""One process, one device, the plain model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from surefoot.training.engine.base import ALL, Elements, Groups, Stepping, own_gradients
from surefoot.training.optimizer import Optimizer
from surefoot.training.optimizer_state import load_optimizer_tensors, optimizer_tensors
from surefoot.training.ranks import ALONE


class SingleEngine(Stepping):
    """Holds the plain model in one process.

    groups: None puts all parameters into one.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        groups: Groups | None = None,
    ):
        device = next(iter(parameters.values())).device
        super().__init__(model, parameters, optimizer, groups or {ALL: parameters}, ALONE, device)

    def grad_norms(self) -> dict[str, torch.Tensor]:
        return plain_norms(self.groups)

    def gather_state(self) -> dict[str, torch.Tensor]:
        return optimizer_tensors(self.optimizer, self.parameters)

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_optimizer_tensors(self.optimizer, self.parameters, tensors)

    def gathered(self, frozen: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def elements(self) -> Elements:
        return plain_elements(self.model, self.parameters)


def plain_norms(groups: Groups) -> dict[str, torch.Tensor]:
    """Of gradients that are whole on this rank."""
    return {name: nn.utils.get_total_norm(own_gradients(group)) for name, group in groups.items()}


def plain_elements(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> Elements:
    """Of a model that is whole on this rank, with its optimizer."""
    trained = sum(parameter.numel() for parameter in parameters.values())
    return Elements(sum(parameter.numel() for parameter in model.parameters()), trained, trained)
