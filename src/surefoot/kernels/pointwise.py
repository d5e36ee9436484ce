"""RMSNorm, rotary positions and gated activations with a backward pass of their own: fewer passes over memory, and
less is kept.

    RMSNorm  (Zhang and Sennrich 2019)      s = 1 / sqrt(mean(x^2) + eps)     h = s x     y = h (c + w)
             c is 1 in Gemma's form and 0 elsewhere

    g = dy (c + w)       dx = s (g - h mean(g h))       dw = sum over rows of dy h

    rotary   (Su et al. 2021)               y1 = x1 cos1 - x2 sin1     y2 = x2 cos2 + x1 sin2
             for the halves of every head; what is behind `cos.shape[-1]` numbers passes

    dx1 = dy1 cos1 + dy2 sin2     dx2 = dy2 cos2 - dy1 sin1

    SwiGLU   (Shazeer 2020)                 s = 1 / (1 + exp(-g))     y = (g s) u      for gate g and up u

    dg = dy u s (1 + g (1 - s))       du = dy g s

Of a norm x is kept, in its own type, and s of every row in fp32; h is computed again. The plain path keeps x in fp32,
and h beside it where the weight trains. A turn keeps cos and sin, as the plain path does. Of a gated activation
gate and up are kept, and not what the activation makes of the gate. Sums are fp32 (fp64 for fp64); roundings in between
are those of the plain path.

Who computes is an `Arithmetic`: `BLOCKS` on a CPU, Triton's on a GPU (`surefoot.kernels.forms`). `plain_norm`,
`plain_turn` and `plain_gate` are the same in a line each, for autograd; tests hold the rest against them.

Shapes: [..., N] for a norm over N numbers; queries and keys [B, H, T, D] for B rows, H heads, T tokens, D numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surefoot.kernels.blocks import NormForm
from surefoot.kernels.forms import BLOCKS, Arithmetic, Gates
from surefoot.kernels.operands import wide_type


def rms_norm(x: torch.Tensor, weight: torch.Tensor, form: NormForm, by: Arithmetic = BLOCKS) -> torch.Tensor:
    """x [..., N], weight [N] -> [..., N], differentiable in both."""
    return _Norm.apply(x, weight, form, by)  # pyright: ignore[reportReturnType]


def turned_alone(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, by: Arithmetic = BLOCKS) -> torch.Tensor:
    """Of one tensor [B, H, T, D] with cos, sin [B or 1, T, R]: see `turned`."""
    return _Turned.apply(x, cos.unsqueeze(1), sin.unsqueeze(1), by)  # pyright: ignore[reportReturnType]


def turned(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    by: Arithmetic = BLOCKS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' `apply_rotary_pos_emb`: q, k [B, H, T, D] with H at `unsqueeze_dim`; cos, sin [B or 1, T, R], even
    R up to D. Differentiable in q and k."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _Turned.apply(q, cos, sin, by), _Turned.apply(k, cos, sin, by)  # pyright: ignore[reportReturnType]


def gated(gate: torch.Tensor, up: torch.Tensor, by: Gates) -> torch.Tensor:
    """silu(gate) up, of gate and up [..., N]. Differentiable in both."""
    return _Gated.apply(gate, up, by)  # pyright: ignore[reportReturnType]


def plain_norm(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """As the families write it."""
    wide = x.to(wide_type(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + form.eps)
    if form.narrow_first:
        return weight * normed.to(x.dtype)
    return (normed * (form.shift + weight.to(wide.dtype))).to(x.dtype)


def plain_turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Of x [B, H, T, D] with cos, sin [B or 1, 1, T, R]."""
    wide = cos.shape[-1]
    moved, rest = x[..., :wide], x[..., wide:]
    first, second = moved.chunk(2, dim=-1)
    found = moved * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((found, rest), dim=-1) if rest.shape[-1] else found


def plain_gate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """As the families write it."""
    return F.silu(gate) * up


def stored_bytes(width: int, number: int, *, fused: bool, trains: bool = False) -> int:
    """What one RMSNorm over `width` numbers keeps for the backward pass, in bytes per row. number: bytes of one number
    of its input. trains: the weight has a gradient. A turn by positions keeps nothing that grows with the heads."""
    if fused:
        return width * number + 4
    # fp32 input is kept as it is, 16-bit input as the fp32 copy that was squared; h beside it, in the type of the input
    return width * 4 + 4 + (width * number if trains else 0)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, form: NormForm, by: Arithmetic) -> torch.Tensor:  # type: ignore[override]
        with torch.autocast(x.device.type, enabled=False):
            output, scales = by.norm_forward(_rows(x), weight, form)
        ctx.save_for_backward(x, scales, weight)
        ctx.form, ctx.by = form, by
        return output.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, scales, weight = ctx.saved_tensors
        with torch.autocast(x.device.type, enabled=False):
            trains = ctx.needs_input_grad[1]
            dx, dw = ctx.by.norm_backward(_rows(dy), _rows(x), scales, weight, ctx.form, trains=trains)
        return dx.view(x.shape), None if dw is None else dw.to(weight.dtype), None, None


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, by: Arithmetic) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(cos, sin)
        ctx.dtype, ctx.by = x.dtype, by
        with torch.autocast(x.device.type, enabled=False):
            return by.turn(x, cos, sin)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        with torch.autocast(dy.device.type, enabled=False):
            return ctx.by.turn_back(dy, *ctx.saved_tensors).to(ctx.dtype), None, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, by: Gates) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(gate, up)
        ctx.by = by
        with torch.autocast(gate.device.type, enabled=False):
            return by.forward(_rows(gate), _rows(up)).view(gate.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        with torch.autocast(dy.device.type, enabled=False):
            dgate, dup = ctx.by.backward(_rows(dy), _rows(gate), _rows(up))
        return dgate.view(gate.shape), dup.view(up.shape), None


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[..., N] -> [T, N]."""
    return x.reshape(-1, x.shape[-1])
