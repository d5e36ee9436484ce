"""Who holds the parameters and moves them: the seam between the step and one or many processes.

An engine answers six calls. `single` keeps the plain model in one process; engines for several processes fill in the
same six.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from surefoot.training.optimizer import Optimizer
from surefoot.training.optimizer_state import optimizer_tensors
from surefoot.training.scaling import LossScale


class Engine(Protocol):
    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    device: torch.device

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        """Accumulate gradients of a scalar loss that is already divided by the step's weight."""
        ...

    def unscale(self, scale: LossScale | None) -> None:
        """Divide the gradients by the scale that `backward` multiplied the loss with; once per step."""
        ...

    def grad_norm(self) -> torch.Tensor:
        """The global 2-norm of the gradients as they are, a scalar on the device."""
        ...

    def apply(self, lr: float, grad_norm: torch.Tensor, max_grad_norm: float | None) -> None:
        """Clip by the norm just measured, move the parameters at rate lr, drop the gradients."""
        ...

    def discard(self) -> None:
        """Drop the gradients; parameters and moments stay as they are."""
        ...

    def gather_state(self) -> dict[str, torch.Tensor]:
        """Full optimizer state by name, for a checkpoint."""
        ...


class SingleEngine:
    """One process, one device, the plain model."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer):
        self.model = model
        self.parameters = parameters
        self.optimizer = optimizer
        self.device = next(iter(parameters.values())).device

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        (loss if scale is None else loss * scale.scale).backward()

    def unscale(self, scale: LossScale | None) -> None:
        if scale is not None:
            torch._foreach_mul_(self._gradients(), 1.0 / scale.scale)  # pyright: ignore[reportPrivateImportUsage]

    def grad_norm(self) -> torch.Tensor:
        return nn.utils.get_total_norm(self._gradients())

    def apply(self, lr: float, grad_norm: torch.Tensor, max_grad_norm: float | None) -> None:
        if max_grad_norm is not None:
            nn.utils.clip_grads_with_norm_(list(self.parameters.values()), max_grad_norm, grad_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gather_state(self) -> dict[str, torch.Tensor]:
        return optimizer_tensors(self.optimizer, self.parameters)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
