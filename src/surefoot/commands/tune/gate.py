"""Does a setting compute what the run asks for? Its first steps are held against the plain path's.

The first loss is a forward pass, the first gradient norm a backward pass, and the second loss what one update made of
both. Later steps say no more: differences of rounding grow as they train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

COMPARED = 2  # steps
# Relative. 16-bit products keep 8 or 11 bits; sums of many of them agree to about a hundredth in loss and a few
# hundredths in the norm of a gradient. fp32 paths differ by the order of their sums alone.
LOSS_GATE: Mapping[str, float] = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
NORM_GATE: Mapping[str, float] = {"fp32": 1e-3, "bf16": 1e-1, "fp16": 5e-2}


@dataclass(frozen=True)
class Numbers:
    """Of the first steps; None where one is not finite. compute: type of the products that made them."""

    losses: Sequence[float | None]
    grad_norms: Sequence[float | None]
    compute: str = "fp32"


def failure(found: Numbers, wanted: Numbers) -> str:
    """Why the setting may not be taken; empty where it may. The gate is that of the coarser type of both."""
    compute = max(found.compute, wanted.compute, key=LOSS_GATE.__getitem__)
    for name, one, other, gate, count in (
        ("loss", found.losses, wanted.losses, LOSS_GATE[compute], COMPARED),
        ("gradient norm", found.grad_norms, wanted.grad_norms, NORM_GATE[compute], 1),
    ):
        for step, (value, reference) in enumerate(zip(one[:count], other[:count], strict=True), start=1):
            if value is None or reference is None:
                if value is not reference:
                    return f"the {name} of step {step} is not finite"
                continue
            off = abs(value - reference) / max(abs(reference), 1e-8)
            if off > gate:
                return f"the {name} of step {step} is off by {off:.2g}, more than {gate:.2g}"
    return ""
