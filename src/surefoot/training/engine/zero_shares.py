"""Map ZeRO's flat tensors to parameters: which part of a parameter a rank holds, and moments by name from and to them.

DeepSpeed concatenates the parameters of a group and keeps moments as flat tensors. Stages 1 and 2 cut the concatenation
into one piece per rank, possibly inside a parameter; stage 3 cuts every parameter. Either way a rank holds one
contiguous run of a parameter's elements, at one offset of one flat tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import distributed as dist

from surefoot.system.errors import IntegrityError
from surefoot.training.manifest import damaged
from surefoot.training.optimizer_state import FILE, check_state
from surefoot.training.ranks import Ranks

States = Sequence[dict[str, Any]]  # optimizer state per flat tensor; its entries are flat too, or scalars


@dataclass(frozen=True)
class Share:
    """How one parameter is distributed.

    flat: index of the flat tensor that holds it.
    place: offset in that tensor on this rank.
    runs: per rank (first element, one past the last element); empty ranges for ranks that hold none.
    shape: shape of the full parameter.
    """

    flat: int
    place: int
    runs: tuple[tuple[int, int], ...]
    shape: torch.Size


def share_of_row(flat: int, start: int, shape: torch.Size, size: int, ranks: Ranks) -> Share:
    """Return a parameter's share under ZeRO stages 1 and 2.

    start: offset of the parameter in the concatenated group.
    size: elements of each rank's piece of the group.
    """
    elements = shape.numel()

    def run(rank: int) -> tuple[int, int]:
        first = min(max(rank * size - start, 0), elements)
        return first, max(first, min((rank + 1) * size - start, elements))

    return Share(flat, max(start - ranks.rank * size, 0), tuple(map(run, range(ranks.world))), shape)


def share_of_parameter(flat: int, place: int, shape: torch.Size, size: int, ranks: Ranks) -> Share:
    """Return a parameter's share under ZeRO stage 3.

    size: elements of each rank's piece of the parameter; the last pieces are padded.
    """
    elements = shape.numel()
    cuts = [min(rank * size, elements) for rank in range(ranks.world + 1)]
    return Share(flat, place, tuple(pairwise(cuts)), shape)


def own_part(piece: torch.Tensor, elements: int, rank: int) -> torch.Tensor:
    """Strip the padding from a rank's piece under ZeRO stage 3.

    piece: this rank's piece; all are of one size. Padding beyond the parameter's end is uninitialized memory.
    elements: elements of the full parameter.
    """
    flat = piece.flatten()
    return flat[: max(0, elements - rank * len(flat))]


def whole_state(
    shares: Mapping[str, Share], states: States, ranks: Ranks, device: torch.device
) -> dict[str, torch.Tensor]:
    """Gather the moments by name on the CPU of rank 0, one parameter at a time; empty on other ranks. Collective."""
    whole = {}
    for name, share in shares.items():
        for entry, value in states[share.flat].items():
            tensor = value.detach().clone() if value.ndim == 0 else _assemble(value, share, ranks, device)
            if ranks.is_first:
                whole[f"{name}/{entry}"] = tensor.cpu()
    return whole


def _assemble(value: torch.Tensor, share: Share, ranks: Ranks, device: torch.device) -> torch.Tensor:
    """Gather one flat entry as a full tensor. Broadcasts instead of summing, which would lose the sign of zeros."""
    whole = torch.empty(share.shape.numel(), dtype=value.dtype, device=device)
    first, end = share.runs[ranks.rank]
    whole[first:end] = value[share.place : share.place + end - first]
    for rank, (first, end) in enumerate(share.runs):
        if end > first:
            dist.broadcast(whole[first:end], src=rank)
    return whole.view(share.shape)


def put_state(
    shares: Mapping[str, Share],
    flats: Sequence[torch.Tensor],
    states: States,
    tensors: Mapping[str, torch.Tensor],
    ranks: Ranks,
) -> None:
    """Write gathered moments into `states`; the inverse of `whole_state`. Raises IntegrityError for tensors of another
    model, and if parameters of one flat tensor have different step counts."""
    check_state({name: torch.empty(share.shape, device="meta") for name, share in shares.items()}, tensors)
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        share = shares[name]
        flat, state = flats[share.flat], states[share.flat]
        if value.ndim == 0:
            if entry in state and not torch.equal(state[entry].cpu(), value.cpu()):
                what = f"{key} is {value.item():g}, but {state[entry].item():g} for others; DeepSpeed keeps one count"
                raise IntegrityError(damaged(FILE, what, "continue with the engine that wrote it"))
            state[entry] = value.to(flat.device)
            continue
        first, end = share.runs[ranks.rank]
        own = state.setdefault(entry, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
        own[share.place : share.place + end - first] = value.flatten()[first:end].to(own.device)
