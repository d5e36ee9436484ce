"""DoRA's row factor f = m / |W + s B A|, computed without a dense B A.

    |W + s B A|^2 = |W|^2 + 2 s rowdot(W A^T, B) + s^2 rowdot(B (A A^T), B)

needs no tensor larger than [O, r]; |W|^2 is constant as long as W is. The factor is held constant in the backward pass
(Liu et al. 2024, section 4.3), so it changes only when the optimizer updates the weights.

Shapes: O outputs, I inputs, r rank.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

_INVERTIBLE = 1e-3  # if |f| is below, products with f may have lost digits to underflow in fp16
_NEAR_ONE = 0.5  # if |f - 1| is at most this, rounding f - 1 loses no more than rounding f
CYCLE = 256  # period of the pattern of `scale_on_average_`, in tokens
_GOLDEN = (math.sqrt(5) - 1) / 2
# Mean relative distance from a number to the next representable one, in units of eps, over the outputs of a matrix
# product (weighted by their squares, as in a row's gain).
_NEXT = 0.72
_ONE_STEP = 0.625  # times eps: x (1 + 0.625 eps) rounds to the next representable number for every x


@dataclass(frozen=True)
class Factor:
    """f for the current weights.

    values: f, [O], fp32 or wider.
    fine: f - 1, [O], in the compute dtype; None if some f is far from 1.
    rare: for 16-bit types if `fine` is not None; see `scale_on_average_`.
    invertible: whether all f are large enough to divide a product by f again.
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
    """Row factors so close to 1 that they should change only some outputs in 16 bits.

    share: [O], fraction of tokens at which an output moves to the next representable number; above 1 for all tokens.
    then, else_: [O], f - 1 at these tokens and at the others.
    """

    share: torch.Tensor
    then: torch.Tensor
    else_: torch.Tensor


@torch.no_grad()
def factors_of(layers: Sequence[tuple[torch.Tensor, torch.Tensor, torch.dtype]]) -> list[Factor]:
    """Compute DoRA's factor of each layer.

    layers: (magnitude [O], norm [O], compute dtype) of each layer; all on one device.

    All checks are copied to the host at once, because each copy synchronizes with the GPU.
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
    """Make the rare factors from `change`, f - 1 [O]."""
    step = _NEXT * torch.finfo(dtype).eps
    small = change.abs() < step
    then = torch.where(small, change.sign() * (_ONE_STEP * torch.finfo(dtype).eps), change)
    return Rare(
        torch.where(small, change.abs() / step, 2.0),
        then.to(dtype),
        torch.where(small, 0.0, change).to(dtype),
    )


def scaled(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Return f * tensor [..., O]."""
    if factor.fine is None:
        return (tensor * factor.values).to(tensor.dtype)
    return torch.addcmul(tensor, tensor, factor.fine)


def scale_on_average_(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Multiply a contiguous [..., O] by f in place, so that the result is right on average over tokens.

    In 16 bits x (1 + 0.0002) rounds to x, so a magnitude that changes this little in a step would have no effect at any
    token. Instead the output moves to the next representable number at a matching fraction of CYCLE tokens. These are
    spread evenly (multiples of the golden ratio) and depend only on the token's position.
    """
    rare, width = factor.rare, tensor.shape[-1]
    if rare is None:
        return tensor.mul_(factor.values) if factor.fine is None else tensor.addcmul_(tensor, factor.fine)
    flat = tensor.view(-1, width)
    turns = _rows_of_thresholds(width, flat.device)[: len(flat)]
    pattern = torch.where(turns < rare.share, rare.then, rare.else_)
    whole = len(flat) - len(flat) % CYCLE
    if whole:
        cycles = flat[:whole].view(-1, CYCLE, width)
        cycles.addcmul_(cycles, pattern)
    rest = flat[whole:]
    rest.addcmul_(rest, pattern[: len(rest)])
    return tensor


@functools.lru_cache(maxsize=8)
def thresholds(width: int, device: torch.device) -> torch.Tensor:
    """Return [CYCLE + width] thresholds in [0, 1): those of token t and output o are at t % CYCLE + o, so that they are
    evenly spread within any part of a row or column."""
    return (torch.arange(CYCLE + width, dtype=torch.float64) * _GOLDEN).frac().float().to(device)


@functools.lru_cache(maxsize=8)
def _rows_of_thresholds(width: int, device: torch.device) -> torch.Tensor:
    """Return them as [CYCLE, width]. Made contiguous, because results computed from a view with strides (1, 1) are
    transposed, which makes reading them six times as slow."""
    return thresholds(width, device).as_strided((CYCLE, width), (1, 1)).contiguous()


def scaled_rows(weight: torch.Tensor, factor: Factor) -> torch.Tensor:
    """Multiply the rows of [O, I] by f."""
    return scaled(weight.T, factor).T


@torch.no_grad()
def row_squares(weight: torch.Tensor) -> torch.Tensor:
    """Return the squared row norms |W|^2 of [O, I], [O], in fp32 or wider."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32)).square().sum(dim=1)


@torch.no_grad()
def factored_norms(
    weight: torch.Tensor, squares: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float
) -> torch.Tensor:
    """Return the row norms |W + s B A|, [O], in the dtype of `squares`.

    weight: [O, I]; W A^T is computed in its dtype, whose rounding is small compared with |W|^2.
    squares: [O], from `row_squares`.
    a: [r, I].
    b: [O, r].
    """
    wide = squares.dtype
    cross = (weight @ a.to(weight.dtype).T).to(wide)
    a, b = a.to(wide), b.to(wide)
    # In fp32 from here on: the sum may cancel if B A nearly undoes W, and the factor divides by its root.
    change = 2 * scale * cross + scale**2 * (b @ (a @ a.T))
    # clamp: rounding can take a norm of almost 0 below it.
    return (squares + (change * b).sum(dim=1)).clamp(min=0).sqrt()
