"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018, "Mixed Precision Training").

The same rule and constants as torch's GradScaler, as a value: two numbers that go into the checkpoint. The scale is a
power of two, so scaling and unscaling are exact unless something overflows or underflows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

INITIAL = 65536.0
GROWTH_INTERVAL = 2000  # finite steps before the scale doubles
SMALLEST = 1.0  # an overflow here is no longer the scale's fault
LARGEST = 2.0**24  # beyond this a growing scale only brings overflows of its own


@dataclass(frozen=True)
class LossScale:
    scale: float = INITIAL
    good_steps: int = 0

    def after_step(self) -> LossScale:
        if self.good_steps + 1 < GROWTH_INTERVAL:
            return replace(self, good_steps=self.good_steps + 1)
        return LossScale(min(LARGEST, self.scale * 2.0), 0)

    def after_overflow(self) -> LossScale:
        return LossScale(max(SMALLEST, self.scale / 2.0), 0)

    @property
    def can_fall(self) -> bool:
        return self.scale > SMALLEST
