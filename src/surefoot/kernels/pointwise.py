"""RMSNorm and rotary embeddings for CPUs, with custom backward: fewer passes over memory, and fewer saved tensors.

    RMSNorm  (Zhang and Sennrich 2019)      s = 1 / sqrt(mean(x^2) + eps)     h = s x     y = h (c + w)
             c is 1 for Gemma and 0 for other families

    g = dy (c + w)       dx = s (g - h mean(g h))       dw = sum over rows of dy h

    rotary   (Su et al. 2021)               y1 = x1 cos1 - x2 sin1     y2 = x2 cos2 + x1 sin2
             for the halves of every head; elements after the first `cos.shape[-1]` are not rotated

    dx1 = dy1 cos1 + dy2 sin2     dx2 = dy2 cos2 - dy1 sin1

A chain of pointwise operators over a whole micro-batch reads and writes main memory once per operator. Applied to
blocks of rows that fit into a core's cache, it does so only once in total. Nothing is compiled, so only torch is
needed.

The norm saves x in its own dtype and s in fp32, and recomputes h. The plain path saves x in fp32, and h too if the
weight is trainable. The rotation saves cos and sin, like the plain path. Sums are fp32 (fp64 for fp64); intermediate
roundings are those of the plain path.

`plain_norm` and `plain_rotary` are the reference implementations that tests compare with.

Shapes: [..., N] for a norm over N elements, T rows; queries and keys [B, H, T, D] for B rows, H heads, T tokens and
head size D, of which the first R elements are rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from surefoot.kernels.operands import wide_type

# Elements of a block: 384 KiB in fp32, so that a few blocks fit into a 2 MiB L2 cache. Measured from 16 to 4,096 rows
# of 768; half or twice as many are about as fast.
_NUMBERS = 98_304


@dataclass(frozen=True)
class NormForm:
    """A model family's variant of RMSNorm.

    eps: added to the mean square.
    shift: constant added to the weight: 1 for Gemma, else 0.
    narrow_first: whether the normalized row is rounded to the input's dtype before it is multiplied with the weight, as
        in Llama; Gemma multiplies in fp32 and rounds the product.
    """

    eps: float
    shift: float
    narrow_first: bool

    def output_type(self, x: torch.dtype, weight: torch.dtype) -> torch.dtype:
        return torch.promote_types(x, weight) if self.narrow_first else x


def rms_norm(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """Compute RMSNorm of x [..., N] with weight [N]; differentiable in both."""
    return _Norm.apply(x, weight, form)  # pyright: ignore[reportReturnType]


def rotary_alone(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate one tensor [B, H, T, D] with cos, sin [B or 1, T, R]; see `rotary`."""
    return _Rotary.apply(x, cos.unsqueeze(1), sin.unsqueeze(1))  # pyright: ignore[reportReturnType]


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, as transformers' `apply_rotary_pos_emb`: q, k [B, H, T, D] with H at `unsqueeze_dim`;
    cos, sin [B or 1, T, R] with even R <= D. Differentiable in q and k."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)  # pyright: ignore[reportReturnType]


def plain_norm(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """Reference RMSNorm, as written in transformers."""
    wide = x.to(wide_type(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + form.eps)
    if form.narrow_first:
        return weight * normed.to(x.dtype)
    return (normed * (form.shift + weight.to(wide.dtype))).to(x.dtype)


def plain_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Reference rotation of x [B, H, T, D] with cos, sin [B or 1, 1, T, R]."""
    rotated, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    found = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:  # type: ignore[override]
        with torch.autocast(x.device.type, enabled=False):
            output, scales = norm_forward(_as_rows(x), weight, form)
        ctx.save_for_backward(x, scales, weight)
        ctx.form = form
        return output.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, scales, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            trains = ctx.needs_input_grad[1]
            dx, dw = norm_backward(_as_rows(dy), _as_rows(x), scales, weight, ctx.form, trains=trains)
        return dx.view(x.shape), None if dw is None else dw.to(weight.dtype), None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        with torch.autocast(x.device.type, enabled=False):
            return _on_first(_rotate, x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with torch.autocast(dy.device.type, enabled=False):
            return _on_first(_rotate_back, dy, *ctx.saved_tensors).to(ctx.dtype), None, None


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., N] -> [T, N]."""
    return x.reshape(-1, x.shape[-1])


def norm_forward(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output [T, N] and s = 1 / rms [T, 1] (fp32 or wider) for x [T, N] and weight [N]."""
    wide = wide_type(x.dtype)
    output = torch.empty(x.shape, dtype=form.output_type(x.dtype, weight.dtype), device=x.device)
    scales = torch.empty((len(x), 1), dtype=wide, device=x.device)
    factor = weight if form.narrow_first else weight.to(wide) + form.shift
    # Allocated once, so that every block is computed in memory that is in the core's cache already.
    room, squares = (x.new_empty(min(_rows(x), len(x)), x.shape[1], dtype=wide) for _ in range(2))
    for start in range(0, len(x), _rows(x)):
        part = slice(start, start + _rows(x))
        scale, block = scales[part], room[: len(scales[part])]
        block.copy_(x[part])
        torch.mean(torch.mul(block, block, out=squares[: len(block)]), dim=1, keepdim=True, out=scale)
        scale.add_(form.eps).rsqrt_()
        block.mul_(scale)
        if not form.narrow_first:
            output[part].copy_(block.mul_(factor))
        elif output.dtype == x.dtype:
            output[part].copy_(block).mul_(factor)
        else:
            torch.mul(block.to(x.dtype), factor, out=output[part])
    return output, scales


def norm_backward(
    dy: torch.Tensor, x: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, form: NormForm, *, trains: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return dx [T, N] and, if the weight is trainable, dw [N] (fp32 or wider), for dy, x [T, N] and s [T, 1]."""
    width = x.shape[1]
    dx = torch.empty_like(x)
    total = torch.zeros(width, dtype=scales.dtype, device=x.device) if trains else None
    factor = weight.to(scales.dtype) + form.shift
    rooms = [x.new_empty(min(_rows(x), len(x)), width, dtype=scales.dtype) for _ in range(3 if trains else 2)]
    for start in range(0, len(x), _rows(x)):
        part = slice(start, start + _rows(x))
        scale = scales[part]
        normed, gradient, *spare = (room[: len(scale)] for room in rooms)
        normed.copy_(x[part]).mul_(scale)
        gradient.copy_(dy[part])
        if total is not None:
            total += torch.mul(gradient, normed, out=spare[0]).sum(dim=0)
        gradient.mul_(factor)
        # g - h mean(g h): the second term removes the gradient along the row's length, which the norm cancels.
        inner = torch.linalg.vecdot(gradient, normed).unsqueeze(1).div_(-width)
        dx[part].copy_(gradient.addcmul_(normed, inner).mul_(scale))
    return dx, total


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x cos + (-x2, x1) sin for x [..., R] with halves x1, x2; cos, sin [..., R] broadcast."""
    half = x.shape[-1] // 2
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    rotated = wide * cos
    rotated[..., :half].addcmul_(wide[..., half:], sin[..., :half], value=-1)
    rotated[..., half:].addcmul_(wide[..., :half], sin[..., half:])
    return rotated


def _rotate_back(dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `_rotate` with respect to x."""
    half = dy.shape[-1] // 2
    found = dy * cos
    found[..., :half].addcmul_(dy[..., half:], sin[..., half:])
    found[..., half:].addcmul_(dy[..., :half], sin[..., :half], value=-1)
    return found


def _on_first(
    change: Callable[..., torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Apply `change` to the first R elements of every head (the width of cos); the rest passes unchanged."""
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return change(x, cos, sin)
    return torch.cat((change(x[..., :rotated], cos, sin), x[..., rotated:]), dim=-1)


def _rows(x: torch.Tensor) -> int:
    """Return the rows of a block: a function of the width alone, so that sums have the same order on every machine."""
    return max(1, _NUMBERS // x.shape[1])
