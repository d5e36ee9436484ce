"""Confidence intervals of measured shares. Separate from the tables, which need rich, so that importing it is cheap."""

from __future__ import annotations

import math
from collections.abc import Sequence

_Z = 1.959964  # of the normal distribution, for 95 %


def wilson(share: float, count: float) -> tuple[float, float]:
    """Wilson's 95 % interval: (p + z²/2n ± z sqrt(p (1 - p)/n + z²/4n²)) / (1 + z²/n). Unlike the standard error, it
    has a width at 0 of n and n of n (Wilson, 1927)."""
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    middle, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def mean_interval(chances: Sequence[float], draws: int) -> tuple[float, float]:
    """95 % interval of the mean of chances, over prompts such as these: Wilson's for the count n of answers whose mean
    has the same standard error, m (1 - m) / n = s² / P. Without a spread, as at 0 and 1, n is P.

    chances: of P prompts, each 0 to 1.
    draws: of each prompt; n is at most P times this.
    """
    count = len(chances)
    mean = math.fsum(chances) / count
    spread = math.fsum((one - mean) ** 2 for one in chances) / max(1, count - 1)
    alike = mean * (1 - mean) * count / spread if spread else count
    return wilson(mean, min(max(alike, count), draws * count))
