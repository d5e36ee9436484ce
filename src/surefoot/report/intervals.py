"""Confidence intervals of measured shares. Apart from the tables, which need rich: wrong arguments are told first."""

from __future__ import annotations

import math

_Z = 1.959964  # of the normal distribution, for 95 %


def wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's interval, 95 %: (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n). It has a width at 0 of n and n
    of n, too, where the standard error is 0 (Wilson, 1927)."""
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    middle, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)
