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

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn

from surefoot.training.optimizer import Optimizer, trainable_parameters
from surefoot.training.ranks import Ranks
from surefoot.training.scaling import LossScale

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
    """Numbers that a rank holds between two steps. parameters: of the model, frozen ones included. gradients: of those
    that train, once `reduce` has run. optimizer: of the parameters whose moments it keeps."""

    parameters: int
    gradients: int
    optimizer: int


class Engine(Protocol):
    """parameters: all that train, by name, as this rank holds them. groups: the same by group. rank, world: which
    process of how many."""

    model: nn.Module
    parameters: Mapping[str, nn.Parameter]
    groups: Groups
    optimizer: Optimizer
    device: torch.device
    ranks: Ranks
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
        """Drop the gradients; parameters and moments stay as they are. Every rank must."""
        ...

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """What this rank holds of the gradients, by the name of a parameter or of what it was put together to."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """What this rank holds of the parameters that train, by name."""
        ...

    def moments(self) -> Mapping[str, torch.Tensor]:
        """What this rank holds of the optimizer's state, by parameter, or what they were put together to, and entry."""
        ...

    def gather_state(self) -> dict[str, torch.Tensor]:
        """Full optimizer state by name, for a checkpoint; empty on all ranks but the first. Every rank must ask."""
        ...

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse, from tensors that every rank has. Raises IntegrityError for those of another model."""
        ...

    def gathered(self, frozen: bool = True) -> AbstractContextManager[None]:
        """Inside, on rank 0, the model's parameters are whole and can be read and written to files; a forward pass is
        not possible. frozen: also those that do not train. Every rank must enter."""
        ...

    def check_replicas(self) -> None:
        """Raises EnvironmentFault where ranks that should hold the same weights do not. Every rank must ask."""
        ...

    def elements(self) -> Elements:
        """What this rank holds, counted."""
        ...

    def release(self) -> None:
        """No further step is taken: let go of what would keep the models in memory for as long as the process lives."""
        ...
