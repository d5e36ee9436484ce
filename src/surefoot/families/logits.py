"""What models do to the output of their head, in the keys of config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_CAP = "final_logit_softcapping"  # Gemma 2 and later: tanh at this height
_FACTORS = ("logit_scale", "lm_head_multiplier")  # Command R; Falcon-H1
_DIVISOR = "logits_scaling"  # Granite


def read_logit_change(get: Callable[[str], Any]) -> tuple[float, float | None]:
    """Return (scale, cap): logits are scale z, or cap tanh(scale z / cap), of the head's output z.

    get: returns a key's value, None where it is missing.
    """
    factor = next((float(value) for value in map(get, _FACTORS) if _is_number(value)), 1.0)
    divisor, cap = get(_DIVISOR), get(_CAP)
    return factor / divisor if _is_number(divisor) else factor, float(cap) if _is_number(cap) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
