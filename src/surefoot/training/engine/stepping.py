"""What all engines have in common that leave gradients on the parameters and step torch's own optimizer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.training.engine.base import ALL, Elements, Groups, PerGroup, of_group
from surefoot.training.optimizer import Optimizer
from surefoot.training.optimizer_state import state_entries
from surefoot.training.ranks import Ranks, totals
from surefoot.training.scaling import LossScale


class Stepping(ABC):
    """See `Engine` for what each call does."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        groups: Groups,
        ranks: Ranks,
        device: torch.device,
    ):
        self.model = model
        self.parameters = parameters
        self.groups = groups
        self.optimizer = optimizer
        self.device = device
        self.ranks = ranks
        self.rank, self.world = ranks.rank, ranks.world

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        (loss if scale is None else loss * scale.scale).backward()

    @abstractmethod
    def reduce(self) -> None: ...

    def totals(self, values: Sequence[float]) -> list[float]:
        return totals(values, self.ranks)

    def unscale(self, scale: LossScale | None) -> None:
        if scale is not None:
            torch._foreach_mul_(own_gradients(self.parameters), 1.0 / scale.scale)  # pyright: ignore[reportPrivateImportUsage]

    @abstractmethod
    def grad_norms(self) -> dict[str, torch.Tensor]: ...

    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        for name, group in self.groups.items():
            if (limit := of_group(max_grad_norm, name)) is not None:
                clip(own_gradients(group), limit, norms[name])
        for group in self.optimizer.param_groups:
            group["lr"] = of_group(lr, group.get("name", ALL))
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return {name: own_part(one.grad) for name, one in self.parameters.items() if one.grad is not None}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: own_part(one) for name, one in self.parameters.items()}

    def moments(self) -> Mapping[str, torch.Tensor]:
        return {name: own_part(one) for name, one in state_entries(self.optimizer, self.parameters)}

    @abstractmethod
    def gather_state(self) -> dict[str, torch.Tensor]: ...

    @abstractmethod
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    @abstractmethod
    def gathered(self, frozen: bool = True) -> AbstractContextManager[None]: ...

    @abstractmethod
    def check_replicas(self) -> None: ...

    @abstractmethod
    def elements(self) -> Elements: ...

    @abstractmethod
    def release(self) -> None: ...


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of a plain one, its share of a distributed one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_gradients(parameters: Mapping[str, nn.Parameter]) -> list[torch.Tensor]:
    """Of those that have one, what this rank holds."""
    return [own_part(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]


def clip(gradients: Sequence[torch.Tensor], limit: float, norm: torch.Tensor) -> None:
    """Scale down to the norm `limit` what has `norm`, the norm over all ranks; torch's `clip_grads_with_norm_`."""
    if gradients:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        torch._foreach_mul_(list(gradients), factor.to(gradients[0].device))  # pyright: ignore[reportPrivateImportUsage]


def norms_of_shares(
    shares: Mapping[str, Sequence[torch.Tensor]], ranks: Ranks, device: torch.device
) -> dict[str, torch.Tensor]:
    """2-norms of groups of tensors of which every rank holds a share. Squares are added up in float64, in one message;
    every rank gets the same bits."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    squares = torch.stack([_square(tensors).to(device) if tensors else zero for tensors in shares.values()])
    if ranks.world > 1:
        dist.all_reduce(squares)
    return {name: square.sqrt().float() for name, square in zip(shares, squares, strict=True)}


def _square(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()  # pyright: ignore[reportPrivateImportUsage]
