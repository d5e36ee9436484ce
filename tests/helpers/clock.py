"""Waits that nobody waits for: tests of measured times advance the clock where a real run would be slow.

wait = settable_clock(monkeypatch)
wait(0.3)  # to whoever reads time.perf_counter, 0.3 s have passed
"""

import time
from collections.abc import Callable

import pytest


def settable_clock(patch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that advances `time.perf_counter` by so many seconds. A default argument that holds the real
    one is not affected."""
    waited: list[float] = []
    exact = time.perf_counter
    patch.setattr(time, "perf_counter", lambda: exact() + sum(waited))
    return waited.append
