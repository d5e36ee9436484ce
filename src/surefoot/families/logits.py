"""What models do to the output of their head, in the keys of config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CAPS = ("final_logit_softcapping", "logits_soft_cap")  # Gemma 2 and later, RecurrentGemma: tanh at this height
_FACTORS = ("logit_scale", "lm_head_multiplier")  # Command R; Falcon-H1
_DIVISORS = ("logits_scaling",)  # Granite


def read_logit_change(get: Callable[[str], Any]) -> tuple[float, float | None]:
    """Return (scale, cap): logits are scale z, or cap tanh(scale z / cap), of the head's output z.

    get: returns a key's value, None where it is missing.
    """
    factor, divisor, cap = (_first(get, keys) for keys in (_FACTORS, _DIVISORS, _CAPS))
    return (factor or 1.0) / (divisor or 1.0), cap


def _first(get: Callable[[str], Any], keys: tuple[str, ...]) -> float | None:
    """Return the first of the keys' values that is a positive number."""
    numbers = (value for value in map(get, keys) if isinstance(value, int | float) and not isinstance(value, bool))
    return next((float(value) for value in numbers if value > 0), None)
