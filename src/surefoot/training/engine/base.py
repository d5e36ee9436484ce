"""The engine interface: an engine holds the parameters and runs the optimizer, in one or many processes.

    single      the plain model in one process, whose optimizer may lie in host memory
    ddp         the plain model in every process; gradients are summed once per step
    fsdp2       every process holds a shard of weights, gradients and moments
    deepspeed   ZeRO 1 (shards moments), 2 (also gradients) or 3 (also weights)

The step, the guard, clipping and checkpoints are the same for all engines. Parameters are divided into named groups,
each with its own learning rate and clipping. Most methods have one group; PPO has an actor's and a critic's, whose
gradients must not affect each other's clipping.
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
PerGroup = T | Mapping[str, T]  # one value for all groups, or one per group
Groups = Mapping[str, Mapping[str, nn.Parameter]]
Members = Mapping[str, Callable[[str], bool]]  # group -> predicate: does the parameter of this name belong to it
ALL = "all"  # name of the only group, if there is one


def of_group(value: PerGroup[T], group: str) -> T:
    return value[group] if isinstance(value, Mapping) else value  # pyright: ignore[reportReturnType]


def set_rates(optimizer: Optimizer, lr: PerGroup[float]) -> None:
    """Set a step's learning rate of every entry of `param_groups`. lr: of each group's parameters, where `optim.rates`
    names no other."""
    for group in optimizer.param_groups:
        group["lr"] = of_group(lr, group.get("name", ALL)) * group.get("factor", 1.0)


def groups_of(model: nn.Module, members: Members) -> Groups:
    """Divide the trainable parameters into groups; each is in exactly one."""
    parameters = trainable_parameters(model)
    groups = {
        group: {name: one for name, one in parameters.items() if belongs(name)} for group, belongs in members.items()
    }
    assert sum(map(len, groups.values())) == len(parameters), "every trainable parameter is in exactly one group"
    return groups


@dataclass(frozen=True)
class Elements:
    """Numbers of elements that a rank holds.

    parameters: elements of the model's parameters, including frozen ones.
    gradients: elements of gradients after `reduce`.
    optimizer: parameter elements whose moments this rank keeps.
    """

    parameters: int
    gradients: int
    optimizer: int


class Engine(ABC):
    """Holds a model's parameters on one rank and updates them.

    parameters: name -> trainable parameter, as this rank holds it.
    groups: parameter group -> its parameters.
    device: device of the batches.
    ranks: this process's rank and the number of ranks.
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
        """Accumulate gradients of a scalar loss that is already divided by the step's weight.

        scale: loss scale with which the loss is multiplied first, in fp16."""

    def reduce(self) -> None:  # noqa: B027 (some engines have nothing to do here; likewise below)
        """Sum the gradients over all ranks. Call once, after the last `backward` of a step. Collective."""

    def totals(self, values: Sequence[float]) -> list[float]:
        """Sum each of these host numbers over the ranks, in float64. Collective: every rank must call it."""
        return totals(values, self.ranks)

    @abstractmethod
    def unscale(self, scale: LossScale | None) -> None:
        """Divide the gradients by the loss scale that `backward` applied; once per step."""

    @abstractmethod
    def grad_norms(self) -> dict[str, torch.Tensor]:
        """Return group -> global 2-norm of its current gradients, a scalar on the device, equal on all ranks."""

    @abstractmethod
    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        """Clip each group with the given norms, run the optimizer, and drop the gradients.

        lr: learning rate, one for all groups or one per group.
        norms: result of `grad_norms`.
        max_grad_norm: clipping norm; None disables clipping."""

    @abstractmethod
    def discard(self) -> None:
        """Drop the gradients without changing parameters or moments. Collective."""

    @abstractmethod
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of the gradients, by parameter name or by name of the flat buffer that holds them."""

    @abstractmethod
    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of the trainable parameters, by name."""

    def computed_with(self) -> Mapping[str, tuple[torch.Size, torch.Tensor]]:
        """Return name -> shape of the whole trainable parameter, and this rank's part of what the next forward pass
        computes with, to change in place for passes that are discarded, and to change back."""
        return {name: (one.shape, own_part(one.detach())) for name, one in self.parameters.items()}

    @abstractmethod
    def moments(self) -> Mapping[str, torch.Tensor]:
        """Return this rank's part of the optimizer state, by "<parameter or flat buffer>/<entry>"."""

    @abstractmethod
    def gather_state(self) -> dict[str, torch.Tensor]:
        """Return the full optimizer state by name on rank 0, for a checkpoint; empty on other ranks. Collective."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load a gathered optimizer state, given on every rank. Raises IntegrityError if it is of another model."""

    @abstractmethod
    def gathered(self, frozen: bool = True) -> AbstractContextManager[None]:
        """Context in which rank 0 has the model's full parameters, to read or save them. Forward passes are not
        possible inside. Collective.

        frozen: also gather frozen parameters.
        """

    def check_replicas(self) -> None:  # noqa: B027
        """Check that ranks with replicated weights hold the same bits; raises EnvironmentFault if not. Collective."""

    @abstractmethod
    def elements(self) -> Elements:
        """Count the elements that this rank holds."""

    def release(self) -> None:  # noqa: B027
        """Free resources that would keep the models in memory until the process ends. No step may follow."""


class Stepping(Engine):
    """Base of engines that keep gradients on parameters and step torch's own optimizers.

    stepped: name -> the parameter that the optimizer changes and that holds the gradient; the model's own, unless these
        lie elsewhere. `groups` consists of them.
    """

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
        self.stepped = parameters
        self.groups = groups
        self.optimizer = optimizer
        self.device = device
        self.ranks = ranks

    def backward(self, loss: torch.Tensor, scale: LossScale | None) -> None:
        (loss if scale is None else loss * scale.scale).backward()

    def unscale(self, scale: LossScale | None) -> None:
        if scale is not None:
            # Exact, because the scale is a power of two.
            torch._foreach_mul_(own_gradients(self.stepped), 1.0 / scale.scale)  # pyright: ignore[reportPrivateImportUsage]

    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        for name, group in self.groups.items():
            if (limit := of_group(max_grad_norm, name)) is not None:
                clip(own_gradients(group), limit, norms[name])
        set_rates(self.optimizer, lr)
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        # None instead of 0: the memory is free until the next backward pass, and optimizers skip what a step does not
        # use.
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> Mapping[str, torch.Tensor]:
        return {name: own_part(one.grad) for name, one in self.stepped.items() if one.grad is not None}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {name: own_part(one) for name, one in self.stepped.items()}

    def moments(self) -> Mapping[str, torch.Tensor]:
        return {name: own_part(one) for name, one in state_entries(self.optimizer, self.stepped)}


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: the shard of a DTensor, else the whole tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_gradients(parameters: Mapping[str, nn.Parameter]) -> list[torch.Tensor]:
    """Return this rank's part of all gradients that are set."""
    return [own_part(parameter.grad) for parameter in parameters.values() if parameter.grad is not None]


def clip(gradients: Sequence[torch.Tensor], limit: float, norm: torch.Tensor) -> None:
    """Scale gradients down to norm `limit`, as torch's `clip_grads_with_norm_`.

    norm: their norm over all ranks."""
    if gradients:
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)  # clamp, because a comparison would synchronize
        torch._foreach_mul_(list(gradients), factor.to(gradients[0].device))  # pyright: ignore[reportPrivateImportUsage]


def norms_of_shares(
    shares: Mapping[str, Sequence[torch.Tensor]], ranks: Ranks, device: torch.device
) -> dict[str, torch.Tensor]:
    """Compute the 2-norm per group of tensors that are sharded over the ranks. Squares are summed in float64 with one
    all-reduce; every rank gets the same bits. Collective."""
    zero = torch.zeros((), dtype=torch.float64, device=device)
    squares = torch.stack([_square(tensors).to(device) if tensors else zero for tensors in shares.values()])
    if ranks.world > 1:
        dist.all_reduce(squares)
    return {name: square.sqrt().float() for name, square in zip(shares, squares, strict=True)}


def _square(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    # In fp32 the square of a norm above 1.8e19 would be infinite, and the guard would reject a finite gradient.
    return torch.stack(torch._foreach_norm(list(tensors))).double().square().sum()  # pyright: ignore[reportPrivateImportUsage]
