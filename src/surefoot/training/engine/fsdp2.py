"""FSDP2 engine: torch's `fully_shard`; every rank holds a shard of each weight, gradient and moment.

The FSDP units are the decoder layers, the rest of each language model (embeddings, last norm, head), and each module
with parameters outside of the language models. A unit is gathered when its module is called and freed afterwards, so
code must call a language model or value head through its own forward (see `surefoot.models.forward`).

Gradients are summed, not averaged, because losses are divided by the weight over all ranks before. There is no
MixedPrecisionPolicy: the step's autocast decides dtypes, as in every other engine. The casts of whole weights stay for
the backward pass; in full bf16 training of an fp32 model only gradient checkpointing, without autocast's cache, keeps
these from filling a GPU.

After each step all units are resharded: a gathered copy that stayed would be older than the weights.
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
    """FSDP2. `reduce` has nothing to do, as every backward pass reduce-scatters the gradients.

    offload: keep shards in host memory and run the optimizer there.

    Raises InputError for parameters that cannot be sharded.
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
            tensor = _whole(entry)  # one at a time, because every rank holds the full tensor temporarily
            if self.ranks.is_first:
                whole[key] = tensor.cpu()
        return whole

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        load_optimizer_tensors(self.optimizer, self.parameters, tensors, place=_share_like)

    @contextmanager
    def gathered(self, frozen: bool = True) -> Iterator[None]:
        # After a forward pass without a backward pass the root units still hold their whole parameters.
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
    """Shard all parameters of `model` over the ranks, in place; return the FSDP units."""
    require_shareable(model, "fsdp2")
    mesh = init_device_mesh(device.type, (ranks.world,))
    policy = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy()
    units = []
    for root in _roots(model):
        inner = list(decoder_layers(root)) if isinstance(root, PreTrainedModel) else []
        for module in [*inner, root]:
            unit = fully_shard(module, mesh=mesh, offload_policy=policy)
            # FSDP would average: losses are divided by the weight over all ranks before the backward pass.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo does not support a reduction with a factor
            units.append(unit)
    return units


def _roots(module: nn.Module) -> list[nn.Module]:
    """Find the modules whose forward a method calls: language models, and heads outside of them."""
    inside = any(isinstance(one, PreTrainedModel) for one in module.modules())
    if isinstance(module, PreTrainedModel) or not inside:
        return [module] if next(module.parameters(), None) is not None else []
    found = [root for child in module.children() for root in _roots(child)]
    return list({id(root): root for root in found}.values())


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _share_like(entry: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Return this rank's shard of a moment; entries of another shape (the step counter) are kept on every rank."""
    assert isinstance(parameter, DTensor)
    if entry.shape != parameter.shape:
        return entry.to(parameter.device)
    # src_data_rank None: every rank has read the whole moment, so nothing has to be sent.
    return distribute_tensor(
        entry.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )
