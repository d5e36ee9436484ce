"""Speed of a session, and the forecast of its remaining time.

Time spent evaluating and saving is left out, and only steps of this session count, so neither a slow evaluation nor a
resume distorts the forecast. The clock is monotonic, so a corrected wall clock changes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_RECENT = 64  # steps used for the forecast: enough to average over uneven batches, few enough to follow a change
_TRIM = 0.125  # share of them dropped at each end: a first step that compiles, a hiccup of the disk


@dataclass(frozen=True)
class Timing:
    """Times and rates of a session at one step.

    elapsed: seconds since the start of the run, all sessions.
    remaining: forecast in seconds, None before the first step.
    throughput, supervised_throughput: tokens per second since the last `mark`; the latter is None if the run does not
        learn from tokens.
    peak_memory: bytes.
    """

    elapsed: float
    remaining: float | None
    throughput: float | None
    supervised_throughput: float | None
    peak_memory: int | None


class Pace:
    """Measures the time between steps. elapsed_before: seconds of earlier sessions."""

    def __init__(self, *, elapsed_before: float = 0.0, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._started = clock() - elapsed_before
        self._last = clock()
        self._paused = 0.0  # seconds since the last step
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._window = 0.0  # seconds of stepping since the last mark
        self._tokens = 0
        self._supervised = 0

    def step(self, tokens: int, supervised: int) -> None:
        """Record a completed step with its numbers of real input tokens and supervised tokens."""
        now = self._clock()
        seconds = max(0.0, now - self._last - self._paused)
        self._last, self._paused = now, 0.0
        self._recent.append(seconds)
        self._window += seconds
        self._tokens += tokens
        self._supervised += supervised

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager: time spent inside belongs to no step."""
        before = self._clock()
        try:
            yield
        finally:
            self._paused += self._clock() - before

    def timing(self, steps_left: int, peak_memory: int | None = None) -> Timing:
        per_step = typical(self._recent)
        return Timing(
            elapsed=self._clock() - self._started,
            remaining=None if per_step is None else per_step * steps_left,
            throughput=self._tokens / self._window if self._window else None,
            supervised_throughput=self._supervised / self._window if self._window else None,
            peak_memory=peak_memory,
        )

    def mark(self) -> None:
        """Start a new window for the token rates."""
        self._window, self._tokens, self._supervised = 0.0, 0, 0


def typical(seconds: deque[float] | list[float]) -> float | None:
    """Mean without the extremes. Not the median: batches differ in length, and the sum of the rest matters."""
    if not seconds:
        return None
    drop = max(int(len(seconds) * _TRIM), 1 if len(seconds) >= 3 else 0)
    kept = sorted(seconds)[drop : len(seconds) - drop]
    return sum(kept) / len(kept)


def clock_text(seconds: float) -> str:
    """Format as H:MM:SS, with hours beyond 24: the format that readers of trainer_log.jsonl parse."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}"


def clock_seconds(text: str) -> float:
    """The inverse of `clock_text`."""
    hours, minutes, seconds = (int(part) for part in text.split(":"))
    return float(hours * 3600 + minutes * 60 + seconds)
