"""Who holds the parameters and moves them: the seam between the step and one or many processes.

An engine answers eight calls. `single` keeps the plain model in one process; engines for several processes fill in the
same eight. Parameters stand in named groups, each with its own rate and its own clipping: one group in most stages, an
actor's and a critic's in PPO, which must not clip each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn

from surefoot.training.optimizer import Optimizer
from surefoot.training.optimizer_state import optimizer_tensors
from surefoot.training.scaling import LossScale

T = TypeVar("T")
PerGroup = T | Mapping[str, T]  # one value for all groups, or each group's own
Groups = Mapping[str, Mapping[str, nn.Parameter]]
ALL = "all"  # the group of a run that has but one


def of_group(value: PerGroup[T], group: str) -> T:
    return value[group] if isinstance(value, Mapping) else value  # pyright: ignore[reportReturnType]


class Engine(Protocol):
    """parameters: all that train, by name. groups: the same by group. rank, world: which process of how many."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    groups: Groups
    optimizer: Optimizer
    device: torch.device
    rank: int
    world: int

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        """Accumulate gradients of a scalar loss that is already divided by the step's weight."""
        ...

    def reduce(self) -> None:
        """Make the gradients those of all ranks; once, after the last `backward` of a step."""
        ...

    def totals(self, values: Sequence[float]) -> list[float]:
        """Each of these host numbers, added up over the ranks in float64. Every rank must ask."""
        ...

    def unscale(self, scale: LossScale | None) -> None:
        """Divide the gradients by the scale that `backward` multiplied the loss with; once per step."""
        ...

    def grad_norms(self) -> dict[str, torch.Tensor]:
        """Of each group the global 2-norm of the gradients as they are, a scalar on the device; the same on all
        ranks."""
        ...

    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        """Clip each group by the norm just measured, move the parameters at its rate, drop the gradients."""
        ...

    def discard(self) -> None:
        """Drop the gradients; parameters and moments stay as they are."""
        ...

    def gather_state(self) -> dict[str, torch.Tensor]:
        """Full optimizer state by name, for a checkpoint. Every rank must ask."""
        ...


class SingleEngine:
    """One process, one device, the plain model. groups: None puts all parameters into one."""

    rank = 0
    world = 1

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        optimizer: Optimizer,
        groups: Groups | None = None,
    ):
        self.model = model
        self.parameters = parameters
        self.groups = groups or {ALL: parameters}
        self.optimizer = optimizer
        self.device = next(iter(parameters.values())).device

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        (loss if scale is None else loss * scale.scale).backward()

    def reduce(self) -> None:
        pass

    def totals(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def unscale(self, scale: LossScale | None) -> None:
        if scale is not None:
            gradients = _gradients(self.parameters)
            torch._foreach_mul_(gradients, 1.0 / scale.scale)  # pyright: ignore[reportPrivateImportUsage]

    def grad_norms(self) -> dict[str, torch.Tensor]:
        return {name: nn.utils.get_total_norm(_gradients(group)) for name, group in self.groups.items()}

    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        for name, group in self.groups.items():
            if (limit := of_group(max_grad_norm, name)) is not None:
                nn.utils.clip_grads_with_norm_(list(group.values()), limit, norms[name])
        for group in self.optimizer.param_groups:
            group["lr"] = of_group(lr, group.get("name", ALL))
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def gather_state(self) -> dict[str, torch.Tensor]:
        return optimizer_tensors(self.optimizer, self.parameters)


def _gradients(parameters: Mapping[str, nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
