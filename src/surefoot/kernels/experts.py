"""LoRA on the experts of a mixture-of-experts layer, without forming W + s B A.

Tokens are sorted by expert, so that each of these products is one grouped matrix product (torch's `grouped_mm`):

    y_e = x_e W_e^T + s (x_e A_e^T) B_e^T        for the rows x_e of expert e

PEFT adds s B A to all of W in W's dtype: a copy of all experts per layer, saved for the backward pass, in which 16 bits
round away most of a small change. Here A and B are applied separately. `plain_experts` is the reference implementation
that tests compare with.

Shapes: T tokens, k experts per token, S = T k rows sorted by expert, E experts, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

_ALIGNED = 16  # bytes; strides of `grouped_mm` operands must be multiples of it


@dataclass(frozen=True)
class Matrices:
    """One projection of all experts.

    weight: [E, I, O], frozen.
    bias: [E, O], frozen, or None.
    a: [E * r, I], expert-major; None without an adapter.
    b: [O, r * E], with the expert index varying fastest; None without an adapter.
    scale: s.
    turned: whether the model stores the weight as [E, O, I], which it then is.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    a: torch.Tensor | None = None
    b: torch.Tensor | None = None
    scale: float = 1.0
    turned: bool = False


def adapted_experts(
    x: torch.Tensor,
    index: torch.Tensor,
    share: torch.Tensor,
    up: Matrices,
    down: Matrices,
    activate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Compute the experts' output, [T, H], in the dtype of x.

    x: [T, H].
    index: [T, k], the experts of each token.
    share: [T, k], their routing weights.
    activate: maps the output of `up` to the input of `down`.
    """
    experts, count = len(up.weight), index.shape[1]
    # Stable: an expert's rows keep the order of the tokens, so its sums do not differ from run to run.
    chosen, order = index.reshape(-1).sort(stable=True)
    # Not `bincount`, for whose size the host waits for a GPU. Integers add up to the same in any order.
    counts = torch.zeros(experts, dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    inner = activate(_project(x[order // count], up, chosen, ends))
    out = _project(inner, down, chosen, ends) * share.reshape(-1)[order].unsqueeze(1)
    # The inverse permutation: rows are gathered back and summed over k. `index_add` into the tokens has no fixed order
    # on a GPU.
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return out[back].view(len(x), count, -1).sum(dim=1).to(x.dtype)


def _project(x: torch.Tensor, one: Matrices, chosen: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Apply one projection, [S, I] -> [S, O], in the weight's dtype. chosen: [S], expert per row; ends: see
    `grouped`."""
    x = x.to(one.weight.dtype)
    y = _Frozen.apply(x, one.weight, one.turned, ends)
    if one.a is not None and one.b is not None:
        experts = len(ends)
        down = one.a.to(x.dtype).view(experts, -1, x.shape[1]).transpose(1, 2)  # [E, I, r]
        up = one.b.to(x.dtype).view(one.b.shape[0], -1, experts).permute(2, 1, 0).contiguous()  # [E, r, O]
        y = torch.add(y, grouped(grouped(x, down, ends), up, ends), alpha=one.scale)
    return y if one.bias is None else y + one.bias.to(y.dtype)[chosen]


class _Frozen(torch.autograd.Function):
    """The product with frozen matrices. It saves the parameter itself, not the view that is multiplied: ZeRO 3 gives a
    parameter other memory for each pass, and a view would keep all experts that were gathered for the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, turned: bool, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight, ends)
        ctx.turned = turned
        return grouped(x, weight.transpose(1, 2) if turned else weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, change: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        weight, ends = ctx.saved_tensors
        return grouped(change, weight if ctx.turned else weight.transpose(1, 2), ends), None, None, None


def grouped(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows with its matrix, [S, I] x [E, I, O] -> [S, O]. ends: [E] int32, end row per group."""
    with torch.autocast(x.device.type, enabled=False):
        if _is_taken(x.dtype, x.device.type) and _is_aligned(x) and _is_aligned(weight):
            return F.grouped_mm(x, weight, offs=ends)
        bounds = [0, *ends.tolist()]
        return torch.cat([x[begin:end] @ weight[number] for number, (begin, end) in enumerate(pairwise(bounds))])


def _is_taken(dtype: torch.dtype, device: str) -> bool:
    """Whether torch's `grouped_mm` supports this dtype and device."""
    return dtype in (torch.bfloat16, torch.float16) or (device == "cpu" and dtype == torch.float32)


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Whether `grouped_mm` accepts the layout: one matrix stride is 1, the other strides are multiples of 16 bytes."""
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
    """Reference for `adapted_experts`, differentiated by autograd."""
    out = torch.zeros_like(x)
    for number in range(len(up.weight)):
        tokens, place = (index == number).nonzero(as_tuple=True)
        inner = activate(_plain(x[tokens], up, number))
        out = out.index_add(0, tokens, _plain(inner, down, number) * share[tokens, place, None])
    return out


def _plain(x: torch.Tensor, one: Matrices, number: int) -> torch.Tensor:
    y = x @ (one.weight[number].T if one.turned else one.weight[number])
    if one.a is not None and one.b is not None:
        experts = len(one.weight)
        rank = len(one.a) // experts
        y = y + one.scale * x @ one.a[number * rank : (number + 1) * rank].T @ one.b[:, number::experts].T
    return y if one.bias is None else y + one.bias[number]
