"""DoRA's factor f = m / |W + s B A| by rows, without a dense B A.

    |W + s B A|^2 = |W|^2 + 2 s rowdot(W A^T, B) + s^2 rowdot(B (A A^T), B)

needs nothing larger than [O, r]; |W|^2 stays the same as long as W does. The factor is held constant in the backward
pass (Liu et al. 2024, section 4.3), so it changes when the optimizer moves the weights and at no other time.

Shapes: O outputs, I inputs, r rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_INVERTIBLE = 1e-3  # |f| below it: what was multiplied by f may have lost digits to underflow in fp16
_NEAR_ONE = 0.5  # |f - 1| up to here: the rounding of f - 1 is no more than that of f
CYCLE = 256  # tokens after which the pattern of `scale_on_average_` comes again
_GOLDEN = (math.sqrt(5) - 1) / 2
# A number between 2^e and 2^(e+1) moves to the next one of its type by this share of itself times eps, in the mean over
# products of a matrix (weighted by their squares, which is what a row's gain is).
_NEXT = 0.72
_ONE_STEP = 0.625  # times eps: x (1 + this eps) rounds to the next number whatever the digits of x


@dataclass(frozen=True)
class Factor:
    """f for one state of the weights.

    values: [O], fp32 or wider.
    fine: f - 1, [O], in the dtype of the products; None where some f is far from 1.
    rare: in types of 16 bits, where `fine` is not None; see `scale_on_average_`.
    invertible: no f is so close to 0 that what was multiplied by it cannot be divided by it.
    magnitude, norm: m and |W + s B A|, [O].
    """

    values: torch.Tensor
    fine: torch.Tensor | None
    rare: Rare | None
    invertible: bool
    magnitude: torch.Tensor
    norm: torch.Tensor


@dataclass(frozen=True)
class Rare:
    """Row factors that move only a few outputs in 16 bits.

    share: [O], of the tokens at which an output moves to the next number of its type; above 1 at all of them.
    then, else_: [O], f - 1 at these and at the others.
    """

    share: torch.Tensor
    then: torch.Tensor
    else_: torch.Tensor


@torch.no_grad()
def factors_of(layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.dtype]]) -> list[Factor]:
    """DoRA's factor of each layer.

    layers: of each its magnitude and norm, [O], and the dtype of its products; all on one device.

    The host reads once for all of them which are near 1 and invertible: each read waits for what a GPU has queued.
    """
    magnitudes = [magnitude.to(norm.dtype, copy=True) for magnitude, norm, _ in layers]
    values = [magnitude / norm for magnitude, (_, norm, _) in zip(magnitudes, layers, strict=True)]
    checks = [((one - 1).abs() <= _NEAR_ONE).all() for one in values] + [
        (one.abs() >= _INVERTIBLE).all() for one in values
    ]
    answers = torch.stack(checks).tolist()
    found = []
    for place, (one, magnitude, (_, norm, dtype)) in enumerate(zip(values, magnitudes, layers, strict=True)):
        near_one, invertible = answers[place], answers[len(values) + place]
        fine = (one - 1).to(dtype) if near_one else None
        rare = _rare(one - 1, dtype) if near_one and dtype.itemsize == 2 else None
        found.append(Factor(one, fine, rare, invertible, magnitude, norm))
    return found


def _rare(change: torch.Tensor, dtype: torch.dtype) -> Rare:
    """change: f - 1, [O]."""
    step = _NEXT * torch.finfo(dtype).eps
    small = change.abs() < step
    then = torch.where(small, change.sign() * (_ONE_STEP * torch.finfo(dtype).eps), change)
    return Rare(
        torch.where(small, change.abs() / step, 2.0),
        then.to(dtype),
        torch.where(small, 0.0, change).to(dtype),
    )


def scaled(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """f times [..., O]."""
    if factor.fine is None:
        return (tensor * factor.values).to(tensor.dtype)
    return torch.addcmul(tensor, tensor, factor.fine)


def scale_on_average_(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """f times a contiguous [..., O], in place, right in the mean over tokens.

    In 16 bits x (1 + 0.0002) is x: the nearest number. A magnitude that moves by so little in a step would move
    nothing, at every token alike. So the output moves to the next number at as many of CYCLE tokens as make up for it,
    spread evenly (multiples of the golden ratio), the same ones whenever the same tokens come.
    """
    rare, width = factor.rare, tensor.shape[-1]
    if rare is None:
        return tensor.mul_(factor.values) if factor.fine is None else tensor.addcmul_(tensor, factor.fine)
    flat = tensor.view(-1, width)
    turns = _turns(width, flat.device)[: len(flat)]
    pattern = torch.where(turns < rare.share, rare.then, rare.else_)
    whole = len(flat) - len(flat) % CYCLE
    if whole:
        cycles = flat[:whole].view(-1, CYCLE, width)
        cycles.addcmul_(cycles, pattern)
    rest = flat[whole:]
    rest.addcmul_(rest, pattern[: len(rest)])
    return tensor


@functools.lru_cache(maxsize=8)
def _turns(width: int, device: torch.device) -> torch.Tensor:
    """[CYCLE, width], between 0 and 1: any of them in a row or column lie evenly. Each row is the one before, moved by
    one; written out, since what is computed from a view with strides 1, 1 comes out transposed, and outputs are read
    across it six times as slowly."""
    turns = (torch.arange(CYCLE + width, dtype=torch.float64) * _GOLDEN).frac().float().to(device)
    return turns.as_strided((CYCLE, width), (1, 1)).contiguous()


def scaled_rows(weight: torch.Tensor, factor: Factor) -> torch.Tensor:
    """f times the rows of [O, I]."""
    return scaled(weight.T, factor).T


@torch.no_grad()
def row_squares(weight: torch.Tensor) -> torch.Tensor:
    """|W|^2 by rows of [O, I], [O], in fp32 or wider."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)).square().sum(dim=1)


@torch.no_grad()
def factored_norms(
    weight: torch.Tensor, squares: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """|W + s B A| by rows, [O], in the dtype of `squares`.

    weight: [O, I], whose dtype is that of the product W A^T: what it rounds is small against |W|^2.
    squares: [O], of `row_squares`.
    a: [r, I].
    b: [O, r].
    """
    wide = squares.dtype
    cross = (weight @ a.to(weight.dtype).T).to(wide)
    a, b = a.to(wide), b.to(wide)
    # In fp32 from here on: the sum may cancel where B A nearly undoes W, and the factor divides by its root.
    change = 2 * scale * cross + scale**2 * (b @ (a @ a.T))
    return (squares + (change * b).sum(dim=1)).clamp(min=0).sqrt()
