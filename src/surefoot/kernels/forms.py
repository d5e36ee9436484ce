"""The arithmetic of `surefoot.kernels.pointwise`, in the form that suits a device: by blocks on a CPU, by Triton on a
GPU.

Shapes: T rows of N numbers; heads x [B, H, T, D] with cos and sin [B or 1, 1, T, R], the axes 1 and 2 of all of them
changed over where tokens stand in front of heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from surefoot.kernels import blocks

Turn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Gates:
    """forward: gate, up [T, N] -> silu(gate) up. backward: its gradient, gate, up [T, N] -> those of gate and up."""

    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    backward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Arithmetic:
    """name: of the form, for records. norm_forward, norm_backward, turn, turn_back: as in `surefoot.kernels.blocks`.
    gates: None where the plain path is as fast."""

    name: str
    norm_forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_backward: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    turn: Turn
    turn_back: Turn
    gates: Gates | None = None


BLOCKS = Arithmetic("blocks", blocks.norm_forward, blocks.norm_backward, blocks.turn, blocks.turn_back)


def arithmetic_for(kind: str) -> Arithmetic:
    """kind: of device: cpu | cuda. Raises ImportError for cuda where Triton is not installed."""
    return triton_arithmetic() if kind == "cuda" else BLOCKS


def triton_arithmetic() -> Arithmetic:
    """Triton is imported here and nowhere else. Raises ImportError where it is not installed."""
    from surefoot.kernels import triton_pointwise as by_triton

    return Arithmetic(
        f"triton {by_triton.VERSION}",
        by_triton.norm_forward,
        by_triton.norm_backward,
        by_triton.turn,
        by_triton.turn_back,
        Gates(by_triton.gate_forward, by_triton.gate_backward),
    )
