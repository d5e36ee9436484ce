"""Synthetic trials, for tests of what tune does with them."""

from typing import Any

from surefoot.runs.trial import Trial


def made_up(step: float = 1.0, **changes: Any) -> Trial:
    """Return a trial of two timed steps. step: seconds of each."""
    facts: dict[str, Any] = {
        "losses": (2.0, 1.9),
        "grad_norms": (3.0, 2.9),
        "last": step,
        "seconds": (step, step),
        "waiting": (0.0, 0.0),
        "tokens": (100, 300),
        "memory": 2**20,
        "forecast": 2**20,
        "spread": 1.0,
        "held_up": 0.0,
    }
    return Trial(**{**facts, **changes})
