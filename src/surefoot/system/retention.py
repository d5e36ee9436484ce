"""How many checkpoints stay: as many as are asked for, but never the newest alone, for it may be damaged."""

from __future__ import annotations

LEAST_KEPT = 2  # folders with one, whatever a config says


def kept(asked: int) -> int:
    """asked: `checkpoint.keep`."""
    return max(asked, LEAST_KEPT)
