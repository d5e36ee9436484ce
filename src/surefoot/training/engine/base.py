"""Who holds the parameters and moves them: the seam between the step and one or many processes.

    single      the plain model in one process
    ddp         the plain model in every process; gradients are added up once per step
    fsdp2       every process holds a share of weights, gradients and moments
    deepspeed   the same by ZeRO 1 (moments), 2 (and gradients) or 3 (and weights)

The step, the guard, clipping and checkpoints are the same for all of them. Parameters stand in named groups, each with
its own rate and its own clipping: one group in most stages, an actor's and a critic's in PPO, which must not clip each
other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from surefoot.training.optimizer import Optimizer, trainable_parameters
from surefoot.training.optimizer_state import state_entries
from surefoot.training.ranks import Ranks, totals
from surefoot.training.state import LossScale

T = TypeVar("T")
PerGroup = T | Mapping[str, T]  # one value for all groups, or each group's own
Groups = Mapping[str, Mapping[str, nn.Parameter]]
Members = Mapping[str, Callable[[str], bool]]  # group -> whether a parameter of that name belongs to it
ALL = "all"  # the group of a run that has but one


def of_group(value: PerGroup[T], group: str) -> T:
    return value[group] if isinstance(value, Mapping) else value  # pyright: ignore[reportReturnType]


def groups_of(model: nn.Module, members: Members) -> Groups:
    """The trainable parameters by group, each in exactly one."""
    parameters = trainable_parameters(model)
    groups = {
        group: {name: one for name, one in parameters.items() if belongs(name)} for group, belongs in members.items()
    }
    assert sum(map(len, groups.values())) == len(parameters), "every parameter that trains is in exactly one group"
    return groups


@dataclass(frozen=True)
class Elements:
    """Numbers that a rank holds between two steps.

    parameters: of the model, frozen ones included.
    gradients: of those that train, once `reduce` has run.
    optimizer: of the parameters whose moments it keeps.
    """

    parameters: int
    gradients: int
    optimizer: int


class Engine(ABC):
    """Holds a model's parameters on one rank and moves them.

    parameters: all that train, by name, as this rank holds them.
    groups: the same by group.
    device: of the batches.
    ranks: which process of how many; rank and world are its numbers.
    """

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    groups: Groups
    optimizer: Optimizer
    device: torch.device
    ranks: Ranks

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def world(self) -> int:
        return self.ranks.world

    @abstractmethod
    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        """Accumulate gradients of a scalar loss that is already divided by the step's weight."""

    def reduce(self) -> None:  # noqa: B027 (for engines that have nothing to do here, as below)
        """Make the gradients those of all ranks; once, after the last `backward` of a step."""

    def totals(self, values: Sequence[float]) -> list[float]:
        """Each of these host numbers, added up over the ranks in float64. Every rank must ask."""
        return totals(values, self.ranks)

    @abstractmethod
    def unscale(self, scale: LossScale | None) -> None:
        """Divide the gradients by the scale that `backward` multiplied the loss with; once per step."""

    @abstractmethod
    def grad_norms(self) -> dict[str, torch.Tensor]:
        """Of each group the global 2-norm of the gradients as they are, a scalar on the device; the same on all
        ranks."""

    @abstractmethod
    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        """Clip each group by the norm just measured, move the parameters at its rate, drop the gradients."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the gradients; parameters and moments stay as they are. Every rank must."""

    @abstractmethod
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """What this rank holds of the gradients, by the name of a parameter or of what it was put together to."""

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """What this rank holds of the parameters that train, by name."""

    @abstractmethod
    def moments(self) -> Mapping[str, torch.Tensor]:
        """What this rank holds of the optimizer's state, by parameter, or what they were put together to, and entry."""

    @abstractmethod
    def gather_state(self) -> dict[str, torch.Tensor]:
        """Full optimizer state by name, for a checkpoint; empty on all ranks but the first. Every rank must ask."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse, from tensors that every rank has. Raises IntegrityError for those of another model."""

    @abstractmethod
    def gathered(self, frozen: bool = True) -> AbstractContextManager[None]:
        """Inside, on rank 0, the model's parameters are whole and can be read and written to files; a forward pass is
        not possible.

        frozen: also those that do not train.

        Every rank must enter.
        """

    def check_replicas(self) -> None:  # noqa: B027
        """Raises EnvironmentFault where ranks that should hold the same weights do not. Every rank must ask."""

    @abstractmethod
    def elements(self) -> Elements:
        """What this rank holds, counted."""

    def release(self) -> None:  # noqa: B027
        """No further step is taken: let go of what would keep the models in memory for as long as the process lives."""


class Stepping(Engine):
    """What engines share that leave gradients on the parameters and step torch's own optimizer."""

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

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        (loss if scale is None else loss * scale.scale).backward()

    def unscale(self, scale: LossScale | None) -> None:
        if scale is not None:
            torch._foreach_mul_(own_gradients(self.parameters), 1.0 / scale.scale)  # pyright: ignore[reportPrivateImportUsage]

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


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor: all of a plain one, its share of a distributed one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_gradients(parameters: Mapping[str, nn.Parameter]) -> list[torch.Tensor]:
    """Of those that have one, what this rank holds."""
    return [own_part(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]


def clip(gradients: Sequence[torch.Tensor], limit: float, norm: torch.Tensor) -> None:
    """Scale down to the norm `limit` what has `norm`, the norm over all ranks; torch's `clip_grads_with_norm_`."""
    if gradients:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # stays on the device: comparing would wait for it
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
