"""Ranks, and collectives on host data.

    totals             sums of numbers in float64 over gloo; bit-identical on every rank
    first_difference   the first tensor whose bytes differ between ranks, found by hash
    gather_rows        rows of numbers (one per episode) that exist on one rank each, gathered on all: the others add
                       zeros, and float64 represents ids and fp32 numbers exactly
    gather_texts       the same for texts
    all_or_none        what one rank gives up, all do

If `world` is more than 1, there is a process group with backend "gloo" or "cpu:gloo,cuda:nccl": CPU tensors use gloo,
GPU tensors use NCCL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed as dist

from surefoot.models.convert.tensors import as_bytes
from surefoot.system.errors import Fault
from surefoot.system.posting import GivenUp


@dataclass(frozen=True)
class Ranks:
    """This process's place among all processes of the run.

    rank: this process's rank, from 0.
    world: number of ranks.
    local_rank: rank among the processes on the same machine.
    """

    rank: int
    world: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes the run folder."""
        return self.rank == 0


ALONE = Ranks(0, 1, 0)


def totals(values: Sequence[float], ranks: Ranks) -> list[float]:
    """Sum each number over the ranks, in float64. Collective, with the same number of values on every rank."""
    if ranks.world == 1 or not values:
        return list(values)
    # On the CPU, so that gloo adds them: no wait for a GPU's queue.
    numbers = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(numbers)
    return numbers.tolist()


def add_over_ranks(tensors: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """Replace each tensor by its sum over the ranks, with one all-reduce. The tensors must have one dtype and device.
    Collective, with the same shapes in the same order on every rank."""
    if ranks.world == 1 or not tensors:
        return
    # One message: with a message per tensor their latency, not the bandwidth, would decide how long it takes.
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    )


def text_from(source: int, text: str, ranks: Ranks) -> str:
    """Broadcast the text of rank `source`; the `text` of other ranks is ignored. Collective."""
    if ranks.world == 1:
        return text
    content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if ranks.rank == source else None
    length = torch.tensor([0 if content is None else len(content)])
    dist.broadcast(length, src=source)
    received = torch.empty(int(length), dtype=torch.uint8) if content is None else content
    dist.broadcast(received, src=source)
    return received.numpy().tobytes().decode()


@dataclass(frozen=True)
class Difference:
    """A tensor that differs between ranks.

    name: tensor name.
    odd: ranks that differ from the majority; without a majority, ranks that differ from rank 0.
    """

    name: str
    odd: tuple[int, ...]


def first_difference(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> Difference | None:
    """Return the first tensor whose bytes differ between ranks, or None. The list of names is compared first. Sends 32
    bytes per tensor. Collective."""
    if ranks.world == 1:
        return None
    names = list(tensors)
    # Names first: digests belong to each other, and as many arrive, only where all ranks have the same list.
    if odd := _odd_ones(_gathered(_digest("\n".join(names).encode()).unsqueeze(0), ranks)[:, 0]):
        return Difference("the list of names", odd)
    if not names:
        return None
    digests = _gathered(
        torch.stack([_digest(as_bytes(tensors[name].detach().cpu()).numpy().data) for name in names]), ranks
    )
    for number, name in enumerate(names):
        if odd := _odd_ones(digests[:, number]):
            return Difference(name, odd)
    return None


def _gathered(digests: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Gather the digests of all ranks: [N, 32] -> [world, N, 32]."""
    everybody = [torch.empty_like(digests) for _ in range(ranks.world)]
    dist.all_gather(everybody, digests)
    return torch.stack(everybody)


def _odd_ones(digests: torch.Tensor) -> tuple[int, ...]:
    """Return the ranks without the most common digest ([world, 32]); ties go to the digest of the lowest rank."""
    seen = [bytes(one) for one in digests.tolist()]
    commonest = max(seen, key=seen.count)  # the first of the largest
    return tuple(rank for rank, one in enumerate(seen) if one != commonest)


def _digest(content: bytes | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)


Totals = Callable[[Sequence[float]], list[float]]  # see `Engine.totals`


def gather_rows(own: Mapping[int, Sequence[float]], count: int, totals: Totals) -> list[list[float]]:
    """Gather rows of numbers from all ranks.

    own: index (below `count`) -> this rank's row.

    Returns `count` rows; an index that no rank has gives an empty row. Collective.
    """
    lengths = [int(length) for length in totals([float(len(own.get(place, ()))) for place in range(count)])]
    flat: list[float] = []
    for place, length in enumerate(lengths):
        flat += own.get(place) or [0.0] * length
    flat = totals(flat)
    rows, start = [], 0
    for length in lengths:
        rows.append(flat[start : start + length])
        start += length
    return rows


def gather_texts(own: Mapping[int, str], count: int, totals: Totals) -> list[str]:
    """Gather texts like `gather_rows`, as rows of byte values. Collective."""
    rows = gather_rows({place: list(map(float, text.encode())) for place, text in own.items()}, count, totals)
    return [bytes(map(int, row)).decode() for row in rows]


@contextmanager
def all_or_none(totals: Totals) -> Iterator[None]:
    """Raise GivenUp on every rank if the block does on one: a signal need not reach all of them at the same request,
    and those that went on would wait for the others in the next collective. Collective."""
    own = None
    try:
        yield
    except GivenUp as error:
        own = error
    if totals([float(own is not None)])[0]:
        raise own or GivenUp(Fault("another rank", "gave up its requests to a server", code="SF-SERVER"))
