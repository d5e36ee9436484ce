"""LoRA on the experts of a mixture, without forming W + s B A.

Tokens are sorted by expert, so that each of the products below is one of matrices side by side (torch's `grouped_mm`):

    y_e = x_e W_e^T + s (x_e A_e^T) B_e^T        for the rows x_e of expert e

PEFT adds s B A to all of W in W's own type: a copy of all experts in each layer, kept for the backward pass, in which
16 bits round most of a small change away. Here A and B act on their own. `plain_experts` says the same in a loop; tests
hold the rest against it.

Shapes: T tokens, k experts of each, S = T k rows sorted by expert, E experts, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional as F

_ALIGNED = 16  # bytes that the strides of a grouped product must be multiples of


@dataclass(frozen=True)
class Matrices:
    """One projection of all experts.

    weight: [E, I, O], frozen; a view where it is held the other way round.
    bias: [E, O], frozen, or None.
    a: [E * r, I], one expert after the other. b: [O, r * E], expert fastest. None without an adapter.
    scale: s.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0


def adapted_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    share: torch.Tensor,
    up: Matrices,
    down: Matrices,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The experts' output, [T, H], in the type of x.

    x: [T, H]. index: [T, k], which experts a token goes to; share: [T, k], how much of each it takes.
    activate: from what `up` gives to what `down` takes.
    """
    experts, count = len(up.weight), index.shape[1]
    chosen, order = index.reshape(-1).sort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    inner = activate(_project(x[order // count], up, chosen, ends))
    out = _project(inner, down, chosen, ends) * share.reshape(-1)[order].unsqueeze(1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return out[back].view(len(x), count, -1).sum(dim=1).to(x.dtype)


def _project(x: torch.Tensor, one: Matrices, chosen: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[S, I] -> [S, O] in the type of the weight. chosen: expert of each row. ends: of each expert's rows."""
    x = x.to(one.weight.dtype)
    y = grouped(x, one.weight, ends)
    if one.a is not None and one.b is not None:
        experts = len(ends)
        down = one.a.to(x.dtype).view(experts, -1, x.shape[1]).transpose(1, 2)  # [E, I, r]
        up = one.b.to(x.dtype).view(one.b.shape[0], -1, experts).permute(2, 1, 0).contiguous()  # [E, r, O]
        y = torch.add(y, grouped(grouped(x, down, ends), up, ends), alpha=one.scale)
    return y if one.bias is None else y + one.bias.to(y.dtype)[chosen]


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[S, I] with [E, I, O] -> [S, O]: each group of rows with its own matrix. ends: [E], int32."""
    if _is_taken(x.dtype, x.device.type) and _is_aligned(x) and _is_aligned(weight):
        with torch.autocast(x.device.type, enabled=False):
            return F.grouped_mm(x, weight, offs=ends)
    bounds = [0, *ends.tolist()]
    pieces = [x[begin:end] @ weight[number] for number, (begin, end) in enumerate(pairwise(bounds))]
    return torch.cat(pieces)


def _is_taken(dtype: torch.dtype, device: str) -> bool:
    """Whether torch has a grouped product for it; on GPUs for 16 bits."""
    return dtype in (torch.bfloat16, torch.float16) or (device == "cpu" and dtype == torch.float32)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """As torch's grouped product asks: one stride of the matrix is 1, the others are whole pieces of 16 bytes."""
    matrix = tensor.stride()[-2:]
    return 1 in matrix and all(one == 1 or one * tensor.element_size() % _ALIGNED == 0 for one in tensor.stride())


def plain_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    share: torch.Tensor,
    up: Matrices,
    down: Matrices,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """The same by the equation, for autograd."""
    out = torch.zeros_like(x)
    for number in range(len(up.weight)):
        tokens, place = (index == number).nonzero(as_tuple=True)
        inner = activate(_plain(x[tokens], up, number))
        out = out.index_add(0, tokens, _plain(inner, down, number) * share[tokens, place, None])
    return out


def _plain(x: torch.Tensor, one: Matrices, number: int) -> torch.Tensor:
    y = x @ one.weight[number]
    if one.a is not None and one.b is not None:
        experts = len(one.weight)
        rank = len(one.a) // experts
        y = y + one.scale * x @ one.a[number * rank : (number + 1) * rank].T @ one.b[:, number::experts].T
    return y if one.bias is None else y + one.bias[number]
