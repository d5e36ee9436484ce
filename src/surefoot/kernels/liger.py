"""Liger-Kernel's Triton kernels (Hsu et al. 2024, arXiv 2410.10989), on a GPU: RMSNorm, rotary embedding, and the gated
activation of an MLP.

    gated     y = act(gate) up     act is SiLU (SwiGLU) or GELU in its tanh form (GeGLU); Shazeer 2020
              dgate = dy up act'(gate)     dup = dy act(gate)

Importing this module needs no liger-kernel; the first call does. `surefoot.kernels.pointwise` has the formulas of norms
and rotations, and their reference code.

Liger computes rotations in place, and gradients of gate and up in the memory of gate and up. Autograd does not see it,
so a tensor that something else has saved would be silently wrong: DoRA saves the output of a projection for the
gradient of its magnitudes. Rotations therefore get copies, which are still fewer passes over memory than the plain code
makes. Gate and up are overwritten only if the caller says that nothing else keeps them, and their version is
incremented, so that autograd raises an error if something does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from surefoot.kernels import pointwise
from surefoot.kernels.pointwise import NormForm

Gate = Literal["silu", "gelu"]  # gelu: the tanh form
FORMS: tuple[Gate, ...] = ("silu", "gelu")
_TYPES = (torch.float32, torch.bfloat16, torch.float16)  # float64 would be computed in float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, form: NormForm) -> torch.Tensor:
    """Compute RMSNorm of x [..., N] with weight [N]; differentiable in both. It saves x in its own dtype and one fp32
    number per row."""
    rounding = "llama" if form.narrow_first else "gemma"
    with _failing_as_usual():
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction  # pyright: ignore[reportMissingImports]

        # False: otherwise its backward pass overwrites the gradient of its output, which other parts of a layer may
        # read.
        found = _failing_as_usual_backward(LigerRMSNormFunction).apply(x, weight, form.eps, form.shift, rounding, False)
    return found.to(form.output_type(x.dtype, weight.dtype))


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate queries and keys, see `surefoot.kernels.pointwise.rotary`. The halves of cos and sin must be equal, as
    they are in models (Liger reads the first); other shapes and types than Liger's are rotated by surefoot's code."""
    fits = unsqueeze_dim == 1 and q.ndim == k.ndim == 4 and cos.ndim == 3 and cos.shape[0] in (1, q.shape[0])
    if not fits or not q.numel() or {q.dtype, k.dtype, cos.dtype} - set(_TYPES) or cos.shape[1] != q.shape[2]:
        return pointwise.rotary(q, k, cos, sin, unsqueeze_dim)
    return _Rotary.apply(q, k, cos, sin)  # pyright: ignore[reportReturnType]


def gated(gate: torch.Tensor, up: torch.Tensor, form: Gate, *, overwrite: bool = False) -> torch.Tensor:
    """Compute act(gate) up for gate, up [..., N]; differentiable in both, once. It saves gate and up.

    overwrite: whether the backward pass may use the memory of gate and up: nothing else keeps or reads them.
    """
    if gate.dtype != up.dtype or gate.dtype not in _TYPES or not gate.numel():
        return plain_gated(gate, up, form)
    return _Gated.apply(gate, up, form, overwrite)  # pyright: ignore[reportReturnType]


def plain_gated(gate: torch.Tensor, up: torch.Tensor, form: Gate) -> torch.Tensor:
    """Reference for `gated`, as written in transformers."""
    return (F.silu(gate) if form == "silu" else F.gelu(gate, approximate="tanh")) * up


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(q.dtype, cos.dtype)
        cos, sin = cos.float(), sin.float()  # Liger computes in their dtype
        ctx.save_for_backward(cos, sin)
        ctx.dtypes = q.dtype, k.dtype
        with _failing_as_usual():
            from liger_kernel.ops.rope import rope_forward  # pyright: ignore[reportMissingImports]

            q, k, *_ = rope_forward(_copy(q, wide), _copy(k, wide), cos, sin)
        return q, k

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        with _failing_as_usual():
            from liger_kernel.ops.rope import rope_backward  # pyright: ignore[reportMissingImports]

            dq, dk = rope_backward(_copy(dq, dq.dtype), _copy(dk, dk.dtype), cos, sin)
        return dq.to(ctx.dtypes[0]), dk.to(ctx.dtypes[1]), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, form: Gate, overwrite: bool) -> torch.Tensor:  # type: ignore[override]
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.form, ctx.overwrite = form, overwrite
        with _failing_as_usual():
            return _gated_kernels(form)[0](gate, up)[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        gate, up = (one.detach() if ctx.overwrite else one.clone() for one in ctx.saved_tensors)
        with _failing_as_usual():
            dgate, dup = _gated_kernels(ctx.form)[1](gate, up, dy.contiguous())
        if ctx.overwrite:
            torch.autograd.graph.increment_version((gate, up))
        return dgate, dup, None, None


def _gated_kernels(form: Gate) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return forward (gate, up) -> (..., y) and backward (gate, up, dy) -> (dgate, dup) in the memory of gate, up."""
    if form == "silu":
        from liger_kernel.ops.swiglu import swiglu_backward, swiglu_forward  # pyright: ignore[reportMissingImports]

        return swiglu_forward, swiglu_backward
    from liger_kernel.ops.geglu import geglu_backward, geglu_forward  # pyright: ignore[reportMissingImports]

    return geglu_forward, geglu_backward


def _copy(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Copy [B, H, T, D] into memory laid out as [B, T, H, D], which Liger would otherwise make a copy in."""
    return x.transpose(1, 2).to(dtype, copy=True, memory_format=torch.contiguous_format).transpose(1, 2)


@cache
def _failing_as_usual_backward(function: Any) -> Any:
    """Derive from an autograd function one whose backward pass raises RuntimeErrors."""

    class Function(function):
        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            with _failing_as_usual():
                return function.backward(ctx, *gradients)

    return Function


@contextmanager
def _failing_as_usual() -> Iterator[None]:
    """Raise errors of Triton and of imports as RuntimeErrors, after which a run goes on with the plain code."""
    try:
        yield
    except RuntimeError:
        raise
    except Exception as error:
        raise RuntimeError(f"liger-kernel: {str(error) or type(error).__name__}") from error
