"""Output head and cross entropy in one, a few positions at a time, with the gradient formed in the forward pass.

    z = W h + b      l = log sum exp z - z[y]      dl/dz = softmax(z) - e_y      dl/dh = W' dl/dz      dl/dW = dl/dz h'

The gradient of a loss in its logits needs nothing from behind the loss but a factor. So it is formed while the logits
are at hand, multiplied by the head at once, and the logits are forgotten: no tensor of positions x vocabulary exists,
neither in the forward nor in the backward pass. A head that does not train gets no gradient of its own. (The idea:
Liger-Kernel, fused_linear_cross_entropy.py; Apple, Cut Your Losses, arXiv 2411.09009.)

Logits are computed in the type that the plain path computes them in; softmax, loss and the sum of the head's gradient
are fp32 (fp64 for fp64). Where that type is fp16, gradients are lifted before they are narrowed to it: the loss scale,
which does so in the plain path, comes with the factor alone. The plain path, which the tests compare with, is
`plain_losses`.

Trade-off: a head that trains can only be part of a *sum* of losses. Of single ones, the factors are known in the
backward pass alone, when the logits are gone.

Shapes: N positions, H hidden size, V vocabulary; hidden [N, H], weight [V, H], bias [V], targets [N].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surefoot.kernels.operands import operand_type, wide_type

_WIDENED = 1024  # rows of a product that are in fp32 at once, before they are added to a sum
_HIGHEST_LIFT = 14  # a power of two: 1 becomes a quarter of fp16's largest number


@dataclass(frozen=True)
class Head:
    """weight [V, H], bias [V] or None.

    rows: positions whose logits exist at once; each takes 4 V bytes, in 16 bits 6 V.
    see: is shown these logits, [rows or fewer, V], on their way into a loss.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    rows: int
    see: Callable[[torch.Tensor], None] | None = None

    @property
    def trains(self) -> bool:
        return self.weight.requires_grad or (self.bias is not None and self.bias.requires_grad)


def summed_loss(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over all positions: a scalar, differentiable in hidden and head."""
    return _losses(hidden, head, targets, summed=True)


def token_losses(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of every position: [N], differentiable in hidden. ValueError for a head that trains."""
    if head.trains and torch.is_grad_enabled():
        raise ValueError("the gradient of a head that trains needs the sum of the losses")
    return _losses(hidden, head, targets, summed=False)


@torch.no_grad()
def first_choices(hidden: torch.Tensor, head: Head) -> torch.Tensor:
    """The likeliest word at every position, [N]."""
    weight, bias = _cast(head.weight, head.bias, operand_type(hidden.dtype, hidden.device))
    with torch.autocast(hidden.device.type, enabled=False):
        parts = hidden.to(weight.dtype).split(head.rows)
        return torch.cat([F.linear(part, weight, bias).argmax(dim=-1) for part in parts])


def plain_losses(hidden: torch.Tensor, head: Head, targets: torch.Tensor) -> torch.Tensor:
    """The same by torch's own parts, all logits at once: [N], differentiable in everything."""
    logits = F.linear(hidden, head.weight, head.bias)
    with torch.autocast(hidden.device.type, enabled=False):
        return F.cross_entropy(logits.to(wide_type(logits.dtype)), targets, reduction="none")


def _losses(hidden: torch.Tensor, head: Head, targets: torch.Tensor, *, summed: bool) -> torch.Tensor:
    differentiable = torch.is_grad_enabled()
    found: Any = _Chunked.apply(hidden, head.weight, head.bias, targets, head.rows, head.see, summed, differentiable)
    return found


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        rows: int,
        see: Callable[[torch.Tensor], None] | None,
        summed: bool,
        differentiable: bool,
    ) -> torch.Tensor:
        dtype = operand_type(hidden.dtype, hidden.device)
        x = hidden.to(dtype)
        w, b = _cast(weight, bias, dtype)
        # Without gradients torch still calls an input that could have one in need of it.
        needs_hidden, needs_weight, needs_bias = (one and differentiable for one in ctx.needs_input_grad[:3])
        losses = torch.empty(len(x), dtype=wide_type(dtype), device=x.device)
        d_hidden = torch.empty_like(x) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=wide_type(dtype)) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=wide_type(dtype)) if needs_bias and bias is not None else None
        wanted = needs_hidden or needs_weight or needs_bias
        lift = _lift(2 * _largest(w)) if wanted and dtype == torch.float16 else None
        with torch.autocast(x.device.type, enabled=False):
            room = _Room(min(rows, len(x)), len(w), dtype, losses.dtype, x.device)
            for start in range(0, len(x), rows):
                part = slice(start, start + rows)
                words = targets[part].unsqueeze(1)
                logits = room.logits(x[part], w, b)
                if see is not None:
                    see(logits)
                log_p = room.log_softmax(logits)
                chosen = log_p.gather(1, words)  # before `exp_` below overwrites the logits in place
                losses[part] = -chosen.squeeze(1)
                if not wanted:
                    continue
                gradient = log_p.exp_()
                gradient.scatter_(1, words, chosen.exp() - 1)
                if d_bias is not None:
                    d_bias += gradient.sum(dim=0)
                if d_hidden is not None:
                    torch.mm(room.narrow(gradient, lift), w, out=d_hidden[part])
                if d_weight is not None:  # its sums go over positions, not over words
                    own_lift = None if lift is None else _lift(_largest(x[part]) * len(words))
                    _add_product(d_weight, room.narrow(gradient, own_lift).T, x[part], own_lift)
        ctx.lift = lift
        ctx.gradients = (d_hidden, d_weight, d_bias)
        ctx.types = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return losses.sum() if summed else losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        """factor: of the sum, or of each loss [N]."""
        (d_hidden, d_weight, d_bias), ctx.gradients = ctx.gradients, None
        hidden_type, weight_type, bias_type = ctx.types
        if d_hidden is not None:
            own = factor if ctx.lift is None else factor / ctx.lift
            d_hidden = (d_hidden * own.reshape(-1, 1)).to(hidden_type)
        if d_weight is not None:
            d_weight = d_weight.mul_(factor).to(weight_type)
        if d_bias is not None:
            d_bias = d_bias.mul_(factor).to(bias_type)
        return d_hidden, d_weight, d_bias, None, None, None, None, None


class _Room:
    """Where the logits of a part are, and what becomes of them: taken once for all parts. What is as large as this
    comes from the system at each allocation, and has its pages cleared."""

    def __init__(self, rows: int, words: int, dtype: torch.dtype, wide: torch.dtype, device: torch.device):
        """dtype: of the products. wide: of the softmax."""
        self._products = torch.empty(rows, words, dtype=dtype, device=device)
        self._softmax = self._products if wide == dtype else torch.empty(rows, words, dtype=wide, device=device)

    def logits(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        found = self._products[: len(x)]
        if bias is None:
            return torch.mm(x, weight.T, out=found)
        return torch.addmm(bias, x, weight.T, out=found)

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows, V], of what `logits` returned."""
        wide = self._softmax[: len(logits)]
        if wide.dtype != logits.dtype:
            wide.copy_(logits)
        return torch.log_softmax(wide, dim=1, out=wide)  # pyright: ignore[reportCallIssue]

    def narrow(self, gradient: torch.Tensor, lift: torch.Tensor | None) -> torch.Tensor:
        """gradient, times lift, in the type of the products, in the place of the logits."""
        if gradient.dtype == self._products.dtype:
            return gradient
        found = self._products[: len(gradient)]
        return found.copy_(gradient) if lift is None else torch.mul(gradient, lift, out=found)


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, lift: torch.Tensor | None) -> None:
    """total += a b / lift, in the type of `total`."""
    if lift is not None:
        total.addcdiv_(a @ b, lift)
    elif total.dtype == a.dtype:
        total.addmm_(a, b)
    else:  # a few rows at a time: torch would widen the whole product first
        for rows, more in zip(total.split(_WIDENED), (a @ b).split(_WIDENED), strict=True):
            rows += more


def _lift(bound: torch.Tensor) -> torch.Tensor:
    """By what gradients of softmax, which are at most 1, are multiplied before they are narrowed to fp16, where numbers
    below 6e-8 are 0: a power of two that changes no other digit.

    bound: on their product without it, which must not overflow with it either.
    """
    room = torch.finfo(torch.float16).max / 2 / bound
    return room.log2().floor().clamp(0, _HIGHEST_LIFT).exp2()


def _largest(tensor: torch.Tensor) -> torch.Tensor:
    """Magnitude, fp32."""
    return torch.linalg.vector_norm(tensor, torch.inf, dtype=torch.float32)


def _cast(
    weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight.to(dtype), None if bias is None else bias.to(dtype)
