"""What a run waits for, told while it waits: an engine, a reward or another rank can stand still for hours in silence.

    waits = Waits(notify)
    with waits.during("the reward style is asked for 64 answers"):
        ...

A wait is told of when it has lasted a minute and five times as long as the longest of its kind so far, with the time
since when, and again each time that it has doubled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from surefoot.methods.method import Notify

LEAST = 60.0  # seconds that are never too long
_SLOWER = 5.0


class Waits:
    """Of one run."""

    def __init__(self, notify: Notify):
        self._notify = notify
        self._longest: dict[str, float] = {}

    @contextmanager
    def during(self, kind: str, what: str) -> Iterator[None]:
        """kind: what is compared with what came before; what: for the sentence."""
        began, clock, over = time.monotonic(), datetime.now(UTC), threading.Event()

        def watch() -> None:
            wait = max(LEAST, _SLOWER * self._longest.get(kind, 0.0))
            while not over.wait(wait):
                seconds = time.monotonic() - began
                self._notify(f"{what} since {clock:%H:%M:%S} UTC, for {seconds:.0f} s now")
                wait = seconds

        thread = threading.Thread(target=watch, name=f"waits for {kind}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - began)
