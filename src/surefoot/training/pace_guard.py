"""Detect that a run has become slower than it was, by comparison with its own earlier steps only.

A step is slow if it took clearly longer than its amount of work explains, so longer examples cause no alarm. Part of a
step's time is constant, so a step with little work may take as long as an ordinary one. A single slow step causes no
alarm: the median of the last few must be slow.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from statistics import median

WINDOW = 50  # steps whose median defines the ordinary pace
RECENT = 5  # newest steps, which are compared with it
FEWEST = 20  # steps needed before an ordinary pace is defined
FALL = 0.7  # an alarm is raised below this fraction of the ordinary pace
QUIET = 50  # steps after an alarm without another one


@dataclass(frozen=True)
class Slow:
    """Alarm that the run has become slower.

    pace: pace of the last steps as a fraction of the ordinary pace.
    since: the first of these steps.
    """

    pace: float
    since: int


class PaceGuard:
    """Compares each step with the steps before."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW + RECENT)
        self._quiet_until = 0

    def step(self, step: int, seconds: float, work: float) -> Slow | None:
        """Add a step, in order; return an alarm if the last few were slow.

        seconds: duration, including the wait for data.
        work: amount of work, in any unit proportional to time.
        """
        if seconds <= 0 or work <= 0:
            return None
        self._steps.append((seconds, work))
        before = len(self._steps) - RECENT
        if before < FEWEST or step < self._quiet_until:
            return None
        ordinary = list(islice(self._steps, before))
        recent = list(islice(self._steps, before, None))
        usual_seconds = median(one for one, _ in ordinary)
        usual_rate = median(done / one for one, done in ordinary)
        pace = median(max(usual_seconds, done / usual_rate) / one for one, done in recent)
        if pace >= FALL:
            return None
        self._quiet_until = step + QUIET
        return Slow(pace, step - RECENT + 1)
