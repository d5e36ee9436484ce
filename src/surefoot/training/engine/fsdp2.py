"""Every rank holds a share of each weight, gradient and moment: torch's `fully_shard`.

The units are the decoder layers, what else a language model holds (embeddings, last norm, head), and each module with
parameters outside of the language models. A unit is gathered when its module is called and freed after; so a language
model is only ever entered through its own forward (see `surefoot.models.forward`), a value head through its.

Gradients are added, not averaged: losses are divided by the weight of all ranks before. No MixedPrecisionPolicy: the
step's autocast decides dtypes, as in every other engine. What autocast casts it keeps for the backward pass; where a
model of fp32 trains in full under bf16, only gradient checkpointing keeps those copies from filling a GPU.

Between steps every unit is sharded again: a gathered copy that stayed would be older than the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from surefoot.models.decoder import decoder_layers
from surefoot.training.engine.base import (
    Elements,
    Groups,
    Members,
    PerGroup,
    Stepping,
    groups_of,
    norms_of_shares,
    own_gradients,
    own_part,
)
from surefoot.training.engine.sharding import elementwise, require_shareable, whole_parameters
from surefoot.training.optimizer import Optimizer, trainable_parameters
from surefoot.training.optimizer_state import load_optimizer_tensors, state_entries
from surefoot.training.ranks import Ranks


class Fsdp2Engine(Stepping):
    """Has nothing left to `reduce`: every backward pass has added up the gradients and shared them out.

    offload: shares lie in host memory, where the optimizer steps too.

    Raises InputError for parameters that cannot be shared out.
    """

    def __init__(
        self,
        model: nn.Module,
        members: Members,
        make_optimizer: Callable[[Groups], Optimizer],
        ranks: Ranks,
        device: torch.device,
        *,
        offload: bool = False,
    ):
        self._units = shard(model, ranks, device, offload=offload)
        groups = groups_of(model, members)
        super().__init__(
            model, trainable_parameters(model), elementwise(make_optimizer(groups), "fsdp2"), groups, ranks, device
        )

    def grad_norms(self) -> dict[str, torch.Tensor]:
        return norms_of_shares(
            {name: own_gradients(group) for name, group in self.groups.items()}, self.ranks, self.device
        )

    def apply(
        self, lr: PerGroup[float], norms: Mapping[str, torch.Tensor], max_grad_norm: PerGroup[float | None]
    ) -> None:
        super().apply(lr, norms, max_grad_norm)
        self._reshard()

    def gather_state(self) -> dict[str, torch.Tensor]:
        whole = {}
        for key, entry in state_entries(self.optimizer, self.parameters):
            tensor = _whole(entry)  # one at a time: every rank has it for a moment
            if self.ranks.is_first:
                whole[key] = tensor.cpu()
        return whole

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_optimizer_tensors(self.optimizer, self.parameters, tensors, held=_share_like)

    @contextmanager
    def gathered(self, frozen: bool = True) -> Iterator[None]:
        self._reshard()
        with whole_parameters(self.model, _whole, keep=self.ranks.is_first, frozen=frozen):
            yield

    def elements(self) -> Elements:
        self._reshard()
        held = sum(own_part(parameter).numel() for parameter in self.model.parameters())
        trained = sum(own_part(parameter).numel() for parameter in self.parameters.values())
        return Elements(held, trained, trained)

    def _reshard(self) -> None:
        for unit in self._units:
            unit.reshard()


def shard(model: nn.Module, ranks: Ranks, device: torch.device, *, offload: bool) -> list[FSDPModule]:
    """Share out all parameters of `model` over the ranks, in place; returns the units."""
    require_shareable(model, "fsdp2")
    mesh = init_device_mesh(device.type, (ranks.world,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    units = []
    for root in _roots(model):
        inner = list(decoder_layers(root)) if isinstance(root, PreTrainedModel) else []
        for module in [*inner, root]:
            unit = fully_shard(module, mesh=mesh, offload_policy=policy)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
            units.append(unit)
    return units


def _roots(module: nn.Module) -> list[nn.Module]:
    """The modules through whose forward a method enters: language models, and heads outside of them."""
    inside = any(isinstance(one, PreTrainedModel) for one in module.modules())
    if isinstance(module, PreTrainedModel) or not inside:
        return [module] if next(module.parameters(), None) is not None else []
    found = [root for child in module.children() for root in _roots(child)]
    return list({id(root): root for root in found}.values())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _share_like(entry: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Of a moment, this rank's share; what is shaped otherwise (a count of steps) every rank keeps."""
    assert isinstance(parameter, DTensor)
    if entry.shape != parameter.shape:
        return entry.to(parameter.device)
    return distribute_tensor(
        entry.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
