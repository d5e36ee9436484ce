"""The coefficient of the KL penalty, steered so that answers keep a wanted distance from the reference.

    e    = clip(KL / target - 1, ±0.2)
    next = now * (1 + e * answers / horizon)

(Ziegler et al. 2019, section 2.2.) The coefficient rises while answers are farther away than wanted, and falls else.
"""

from __future__ import annotations

_MOST = 0.2  # how much of one horizon's change a single rollout may ask for; the paper's


def next_coefficient(now: float, kl: float, *, target: float | None, horizon: float, answers: int) -> float:
    """kl: mean KL per answer of the last rollout, of so many answers. target: None leaves the coefficient as it is.

    A factor is never negative: a rollout as large as five horizons takes the coefficient to 0 at most.
    """
    if target is None:
        return now
    error = min(max(kl / target - 1, -_MOST), _MOST)
    return now * max(0.0, 1 + error * answers / horizon)
