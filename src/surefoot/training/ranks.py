"""Which process of how many, and what processes exchange on the host.

    totals             numbers added up in float64, over gloo: the same sums, bit for bit, on every rank
    first_difference   the first tensor that is not the same bytes on all ranks, by hash
    gather_rows        numbers of places (episodes) that lie on one rank each, brought to all: the others add zeros, and
                       float64 holds ids and fp32 numbers exactly
    gather_texts       the same of texts

A process group for "cpu:gloo" or "cpu:gloo,cuda:nccl" exists wherever `world` is more than 1: tensors on the host go
over gloo, those on a GPU over NCCL.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist

from surefoot.models.convert.tensors import as_bytes


@dataclass(frozen=True)
class Ranks:
    """Which process of how many.

    rank: this process, from 0.
    world: how many there are.
    local_rank: of this one on its machine.
    """

    rank: int
    world: int
    local_rank: int

    @property
    def is_first(self) -> bool:
        """Whether this process writes what only one may write."""
        return self.rank == 0


ALONE = Ranks(0, 1, 0)


def totals(values: Sequence[float], ranks: Ranks) -> list[float]:
    """Each of these numbers, added up over the ranks in float64. Every rank must ask, with as many."""
    if ranks.world == 1 or not values:
        return list(values)
    numbers = torch.tensor(list(values), dtype=torch.float64)
    dist.all_reduce(numbers)
    return numbers.tolist()


def add_over_ranks(tensors: Sequence[torch.Tensor], ranks: Ranks) -> None:
    """Replace each tensor by its sum over the ranks, in one message. All of one dtype and device; every rank must ask,
    with the same shapes in the same order."""
    if ranks.world == 1 or not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
        list(tensors), [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]
    )


def text_from(source: int, text: str, ranks: Ranks) -> str:
    """The text that rank `source` gives; what the others give is not looked at. Every rank must ask."""
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
    """A tensor that is not the same on all ranks.

    name: of a tensor.
    odd: the ranks that do not have what most have; of two ranks, or of halves, those that do not have what rank 0 has.
    """

    name: str
    odd: tuple[int, ...]


def first_difference(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> Difference | None:
    """The first tensor whose bytes are not the same on all ranks; None where all are. The names must be the same
    everywhere, which is looked at first. Every rank must ask; 32 bytes of each tensor travel."""
    if ranks.world == 1:
        return None
    names = list(tensors)
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
    """[N, 32] of each rank -> [world, N, 32]."""
    everybody = [torch.empty_like(digests) for _ in range(ranks.world)]
    dist.all_gather(everybody, digests)
    return torch.stack(everybody)


def _odd_ones(digests: torch.Tensor) -> tuple[int, ...]:
    """[world, 32] -> the ranks without the commonest digest; of equally common ones, without that of the lowest
    rank."""
    seen = [bytes(one) for one in digests.tolist()]
    commonest = max(seen, key=seen.count)  # the first of the largest
    return tuple(rank for rank, one in enumerate(seen) if one != commonest)


def _digest(content: bytes | memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(hashlib.sha256(content).digest()), dtype=torch.uint8)


Totals = Callable[[Sequence[float]], list[float]]  # see `Engine.totals`


def gather_rows(own: Mapping[int, Sequence[float]], count: int, totals: Totals) -> list[list[float]]:
    """The rows of all ranks, by place.

    own: place (of `count`) -> this rank's numbers.

    Every rank must call it; a place that no rank has comes out empty.
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
    """`gather_rows` of texts, whose bytes are numbers. Every rank must ask."""
    rows = gather_rows({place: list(map(float, text.encode())) for place, text in own.items()}, count, totals)
    return [bytes(map(int, row)).decode() for row in rows]
