"""Which part of which parameter a rank keeps under ZeRO, and moments by name out of and into those parts.

DeepSpeed lays the parameters of a group end to end and keeps moments as flat tensors. Stages 1 and 2 cut the row into
one piece per rank, wherever the cut falls; stage 3 cuts every parameter. Either way a rank keeps, of a parameter, one
run of its elements at one place of one flat tensor.
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

States = Sequence[dict[str, Any]]  # of each flat tensor the optimizer's entries: flat like it, or scalars


@dataclass(frozen=True)
class Share:
    """Of one parameter.

    flat: index of the flat tensor that holds it.
    place: where in it, on this rank.
    runs: of each rank the first element and the one after its last, empty where it keeps none.
    shape: of the whole parameter.
    """

    flat: int
    place: int
    runs: tuple[tuple[int, int], ...]
    shape: torch.Size


def share_of_row(flat: int, start: int, shape: torch.Size, size: int, ranks: Ranks) -> Share:
    """Stages 1 and 2.

    start: of the parameter in the row.
    size: of each rank's piece of the row.
    """
    elements = shape.numel()

    def run(rank: int) -> tuple[int, int]:
        first = min(max(rank * size - start, 0), elements)
        return first, max(first, min((rank + 1) * size - start, elements))

    return Share(flat, max(start - ranks.rank * size, 0), tuple(map(run, range(ranks.world))), shape)


def share_of_parameter(flat: int, place: int, shape: torch.Size, size: int, ranks: Ranks) -> Share:
    """Stage 3.

    size: elements of each rank's piece of the parameter, the last ones padded.
    """
    elements = shape.numel()
    cuts = [min(rank * size, elements) for rank in range(ranks.world + 1)]
    return Share(flat, place, tuple(pairwise(cuts)), shape)


def own_part(piece: torch.Tensor, elements: int, rank: int) -> torch.Tensor:
    """Stage 3.

    piece: of a parameter of so many elements, as a rank keeps it; all pieces are of one size. What the last ones have
        beyond the parameter's end is memory that nobody wrote.
    """
    flat = piece.flatten()
    return flat[: max(0, elements - rank * len(flat))]


def whole_state(
    shares: Mapping[str, Share], states: States, ranks: Ranks, device: torch.device
) -> dict[str, torch.Tensor]:
    """Moments by name, on the host of rank 0; empty elsewhere. One parameter at a time travels. Every rank must ask."""
    whole = {}
    for name, share in shares.items():
        for entry, value in states[share.flat].items():
            tensor = value.detach().clone() if value.ndim == 0 else _assemble(value, share, ranks, device)
            if ranks.is_first:
                whole[f"{name}/{entry}"] = tensor.cpu()
    return whole


def _assemble(value: torch.Tensor, share: Share, ranks: Ranks, device: torch.device) -> torch.Tensor:
    """Runs are sent and not added up: bits stay bits, the sign of a zero too."""
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
    """The inverse of `whole_state`, into `states`. Raises IntegrityError for tensors of another model, and where the
    parameters of one flat tensor have taken different numbers of steps."""
    check_state({name: torch.empty(share.shape, device="meta") for name, share in shares.items()}, tensors)
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        share = shares[name]
        flat, state = flats[share.flat], states[share.flat]
        if value.ndim == 0:
            if entry in state and not torch.equal(state[entry].cpu(), value.cpu()):
                what = (
                    f"{key} is {value.item():g}, and {state[entry].item():g} for others: DeepSpeed counts them together"
                )
                raise IntegrityError(damaged(FILE, what, "go on with the engine that wrote it"))
            state[entry] = value.to(flat.device)
            continue
        first, end = share.runs[ranks.rank]
        held = state.setdefault(entry, torch.zeros_like(flat, dtype=value.dtype, requires_grad=False))
        held[share.place : share.place + end - first] = value.flatten()[first:end].to(held.device)
