"""DoRA's factor f = m / |W + s B A| by rows, without a dense B A.

    |W + s B A|^2 = |W|^2 + 2 s rowdot(W A^T, B) + s^2 rowdot(B (A A^T), B)

needs nothing larger than [O, r]; |W|^2 stays the same as long as W does. The factor is held constant in the backward
pass (Liu et al. 2024, section 4.3), so it changes when the optimizer moves the weights and at no other time.

Shapes: O outputs, I inputs, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_INVERTIBLE = 1e-3  # |f| below it: what was multiplied by f may have lost digits to underflow in fp16
_NEAR_ONE = 0.5  # |f - 1| up to here: the rounding of f - 1 is no more than that of f


@dataclass(frozen=True)
class Factor:
    """f for one state of the weights.

    values: [O], fp32 or wider. coarse, fine: [O], whose sum is f, in the dtype of the products: one number of 16 bits
    would be off by the same half unit at every token. coarse: None stands for 1. invertible: nothing in f is so close
    to 0 that what was multiplied by it cannot be divided by it. magnitude, norm: m and |W + s B A|, [O].
    """

    values: torch.Tensor
    coarse: torch.Tensor | None
    fine: torch.Tensor
    invertible: bool
    magnitude: torch.Tensor
    norm: torch.Tensor


@torch.no_grad()
def factor_of(magnitude: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype) -> Factor:
    """magnitude, norm: [O]. dtype: of the products."""
    magnitude = magnitude.to(norm.dtype, copy=True)
    values = magnitude / norm
    near_one = bool(((values - 1).abs() <= _NEAR_ONE).all())
    coarse = None if near_one else values.to(dtype)
    fine = (values - (1 if coarse is None else coarse.to(values.dtype))).to(dtype)
    return Factor(values, coarse, fine, bool((values.abs() >= _INVERTIBLE).all()), magnitude, norm)


def scaled(tensor: torch.Tensor, factor: Factor) -> torch.Tensor:
    """f times [..., O]."""
    fine, coarse = factor.fine, factor.coarse
    return torch.addcmul(tensor if coarse is None else tensor * coarse, tensor, fine)


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

    weight: [O, I], whose dtype is that of the product W A^T: what it rounds is small beside |W|^2. squares: of
    `row_squares`. a: [r, I]. b: [O, r].
    """
    wide = squares.dtype
    cross = (weight @ a.to(weight.dtype).T).to(wide)
    a, b = a.to(wide), b.to(wide)
    change = 2 * scale * cross + scale**2 * (b @ (a @ a.T))
    return (squares + (change * b).sum(dim=1)).clamp(min=0).sqrt()
