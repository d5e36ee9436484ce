"""DoRA's row factor f = m / |W + s B A|, computed without a dense B A.

    |W + s B A|^2 = |W|^2 + 2 s rowdot(W A^T, B) + s^2 rowdot(B (A A^T), B)

needs no tensor larger than [O, r]; |W|^2 is constant as long as W is. The factor is held constant in the backward pass
(Liu et al. 2024, section 4.3), so it changes only when the optimizer updates the weights.

Shapes: O outputs, I inputs, r rank.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from surefoot.data.batching.batch import numbers_on

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

    The rows of all layers are computed as one vector, because a GPU would wait for the launches of some twenty small
    operators for each layer; and all checks are copied to the host at once, because each copy synchronizes with it.
    """
    found: dict[int, Factor] = {}
    kinds = dict.fromkeys((norm.dtype, dtype) for _, norm, dtype in layers)
    for wide, dtype in kinds:
        own = [place for place, (_, norm, kind) in enumerate(layers) if (norm.dtype, kind) == (wide, dtype)]
        found |= dict(zip(own, _factors([layers[place][:2] for place in own], wide, dtype), strict=True))
    return [found[place] for place in range(len(layers))]


def _factors(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], wide: torch.dtype, dtype: torch.dtype
) -> Iterator[Factor]:
    """As `factors_of`, of layers (magnitude, norm) with these types."""
    sizes = [len(norm) for _, norm in layers]
    magnitudes = torch.cat([magnitude.to(wide) for magnitude, _ in layers])
    norms = torch.cat([norm for _, norm in layers])
    values = magnitudes / norms
    change = values - 1
    # Sums of what fails, up to the end of each layer: NaN fails both.
    fails = torch.stack([~(change.abs() <= _NEAR_ONE), ~(values.abs() >= _INVERTIBLE)]).cumsum(dim=1)
    ends = numbers_on(fails.device, [0, *itertools.accumulate(sizes)], torch.int64)
    far, small = F.pad(fails, (1, 0))[:, ends].diff(dim=1).tolist()
    fine, rare = change.to(dtype).split(sizes), [None] * len(sizes)
    if dtype.itemsize == 2:
        parts = _rare(change, dtype)
        rare = [
            Rare(*each)
            for each in zip(*(part.split(sizes) for part in (parts.share, parts.then, parts.else_)), strict=True)
        ]
    rows = zip(values.split(sizes), fine, rare, far, small, magnitudes.split(sizes), norms.split(sizes), strict=True)
    for value, near, own, is_far, is_small, magnitude, norm in rows:
        yield Factor(value, None if is_far else near, None if is_far else own, not is_small, magnitude, norm)


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
    """Return [CYCLE, width] thresholds in [0, 1), evenly spread within any part of a row or column. Each row is the row
    before, shifted by one. Made contiguous, because results computed from a view with strides (1, 1) are transposed,
    which makes reading them six times as slow."""
    turns = (torch.arange(CYCLE + width, dtype=torch.float64) * _GOLDEN).frac().float().to(device)
    return turns.as_strided((CYCLE, width), (1, 1)).contiguous()


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
