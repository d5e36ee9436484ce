"""Confidence intervals of measured shares. Separate from the tables, which need rich, so that importing it is cheap."""

from __future__ import annotations

import math

_Z = 1.959964  # of the normal distribution, for 95 %


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's 95 % interval: (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n). Unlike the standard error, it
    has a width at 0 of n and n of n (Wilson, 1927)."""
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    middle, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
