"""Is the run slower than it was? By its own pace alone: no other run's number is right for this model and machine.

A step is slow where it took clearly longer than its work asks for. Its work is known beforehand, so longer examples are
no alarm; and since a part of a step costs the same however small it is, a step with little work may take as long as an
ordinary one. One slow step is no alarm either: most of the last few have to be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import islice
from statistics import median

WINDOW = 50  # steps whose median is the ordinary pace
RECENT = 5  # steps that are compared with it
FEWEST = 20  # steps before there is an ordinary pace
FALL = 0.7  # of the ordinary pace: below it is an alarm
QUIET = 50  # steps without another word


@dataclass(frozen=True)
class Slow:
    """The run has become slower.

    pace: of the last steps, as a share of the ordinary one.
    since: the first of these steps.
    """

    pace: float
    since: int


class PaceGuard:
    """Called after every step, in order."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW + RECENT)
        self._quiet_until = 0

    def step(self, step: int, seconds: float, work: float) -> Slow | None:
        """Take note of a step; returns an alarm where the last few were slow.

        seconds: that it took, with the wait for its data.
        work: in any unit that is in proportion to its time.
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
