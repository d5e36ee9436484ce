"""Report what a run waits for: an engine, a reward or another rank can hang silently for hours.

    waits = Waits(notify)
    with waits.during("the reward style is asked for 64 answers"):
        ...

A wait is reported once it has lasted a minute and five times as long as the longest earlier one of its kind, with its
starting time, and again each time it has doubled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from surefoot.methods.method import Notify

LEAST = 60.0  # seconds; shorter waits are never reported
_SLOWER = 5.0


class Waits:
    """Watches the waits of a run."""

    def __init__(self, notify: Notify):
        self._notify = notify
        self._longest: dict[str, float] = {}

    @contextmanager
    def during(self, kind: str, what: str | Callable[[], str]) -> Iterator[None]:
        """Report the block if it takes too long.

        kind: waits to compare with.
        what: text of the message, or what makes it when it is shown.
        """
        began, clock, over = time.monotonic(), datetime.now(UTC), threading.Event()

        def watch() -> None:
            wait = max(LEAST, _SLOWER * self._longest.get(kind, 0.0))
            while not over.wait(wait):
                seconds = time.monotonic() - began
                said = what if isinstance(what, str) else what()
                self._notify(f"{said} since {clock:%H:%M:%S} UTC, for {seconds:.0f} s now")
                wait = seconds

        thread = threading.Thread(target=watch, name=f"waits for {kind}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - began)
