"""What a tensor looks like in a few numbers, computed in float64 a piece at a time.

Values that are not finite are counted and left out of everything else, so that one of them does not hide the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

_PIECE = 1 << 20  # values in float64 at once


@dataclass(frozen=True)
class Summary:
    """std: of the population. zeros: share of values that are exactly 0. non_finite: how many are NaN or infinite.
    All 0.0 where no value is finite."""

    count: int
    mean: float
    std: float
    rms: float
    abs_max: float
    zeros: float
    non_finite: int


@dataclass(frozen=True)
class Split:
    """The first position of a text against those after it. norm: length of a position's vector, meaned over positions;
    rms, abs_max: over values. None after it: the text has one token."""

    first: dict[str, float]
    rest: dict[str, float] | None


def summarise(tensor: torch.Tensor) -> Summary:
    count, non_finite, zeros = 0, 0, 0
    total, squares, largest = 0.0, 0.0, 0.0
    for piece in _pieces(tensor):
        finite = piece[piece.isfinite()]
        count += piece.numel()
        non_finite += piece.numel() - finite.numel()
        zeros += int((finite == 0).sum())
        total += float(finite.sum())
        squares += float(finite.square().sum())
        largest = max(largest, float(finite.abs().max()) if finite.numel() else 0.0)
    good = count - non_finite
    if not good:
        return Summary(count, 0.0, 0.0, 0.0, 0.0, 0.0, non_finite)
    mean = total / good
    summary = Summary(count, mean, 0.0, math.sqrt(squares / good), largest, zeros / good, non_finite)
    return replace(summary, std=math.sqrt(_spread(tensor, mean) / good))


def split_first(activation: torch.Tensor) -> Split:
    """activation: [T, width] of one text."""
    norms = activation.double().norm(dim=-1)
    parts = [_part(activation[:1], norms[:1])]
    if len(activation) > 1:
        parts.append(_part(activation[1:], norms[1:]))
    return Split(parts[0], parts[1] if len(parts) > 1 else None)


def relative_difference(new: torch.Tensor, old: torch.Tensor) -> float | None:
    """|new - old| / |old|. 0.0 where both are zero, None where only the old is or where one is not finite."""
    difference, length = 0.0, 0.0
    for one, other in zip(_pieces(new), _pieces(old), strict=True):
        difference += float((one - other).square().sum())
        length += float(other.square().sum())
    if not math.isfinite(difference) or not math.isfinite(length):
        return None
    if length == 0.0:
        return 0.0 if difference == 0.0 else None
    return math.sqrt(difference / length)


def first_mass(attention: torch.Tensor) -> float | None:
    """Share of attention on the first position, [h, T, T] meaned over heads and the queries after the first, which has
    nothing else to look at. None: there are none."""
    return float(attention[:, 1:, 0].double().mean()) if attention.shape[1] > 1 else None


def as_json(value: Any) -> Any:
    """Floats that JSON cannot hold become None."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _part(values: torch.Tensor, norms: torch.Tensor) -> dict[str, float]:
    found = summarise(values)
    return {"norm": float(norms.mean()), "rms": found.rms, "abs_max": found.abs_max}


def _spread(tensor: torch.Tensor, mean: float) -> float:
    """Sum of squared distances from the mean, in a second pass: from the sums alone it would be lost to rounding."""
    return sum(float((piece[piece.isfinite()] - mean).square().sum()) for piece in _pieces(tensor))


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        yield flat[start : start + _PIECE].double()
