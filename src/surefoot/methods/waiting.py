"""Report what a run waits for: an engine, a reward or another rank can hang silently for hours.

    waits = WaitReporter(notify)
    with waits.during("reward style", "the reward style is asked for 64 answers"):
        ...
    with silence_told([server], notify):     # whatever is asked in the block
        ...

A wait is reported once it has lasted a minute and five times as long as the longest earlier one of its kind, with its
starting time, and again each time it has doubled. A server is reported once it has answered none of its requests for a
minute, and for half as long again as ever before: its requests have limits, within which it should be known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from surefoot.methods.method import Notify
from surefoot.system.messages import counted
from surefoot.system.posting import Server

LEAST = 60.0  # seconds; shorter waits are never reported
_SLOWER, _SLOWER_SERVER = 5.0, 1.5
_LOOK = 1.0  # seconds between looks at servers


class WaitReporter:
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
        began, clock = time.monotonic(), datetime.now(UTC)

        def watch(over: threading.Event) -> None:
            wait = max(LEAST, _SLOWER * self._longest.get(kind, 0.0))
            while not over.wait(wait):
                seconds = time.monotonic() - began
                said = what if isinstance(what, str) else what()
                self._notify(f"{said} since {clock:%H:%M:%S} UTC, for {seconds:.0f} s now")
                wait = seconds

        try:
            with _beside(f"waits for {kind}", watch):
                yield
        finally:
            self._longest[kind] = max(self._longest.get(kind, 0.0), time.monotonic() - began)


@contextmanager
def silence_told(servers: Sequence[Server], notify: Notify) -> Iterator[None]:
    """Report servers that are asked in the block and do not answer."""
    if not servers:
        yield
        return

    def watch(over: threading.Event) -> None:
        last, longest, told = ([0.0] * len(servers) for _ in range(3))
        while not over.wait(min(_LOOK, LEAST)):
            for place, server in enumerate(servers):
                waiting, seconds = server.requests.silence
                if seconds < last[place]:  # it has answered
                    longest[place], told[place] = max(longest[place], last[place]), 0.0
                last[place] = seconds
                if seconds >= (2 * told[place] or max(LEAST, _SLOWER_SERVER * longest[place])):
                    told[place], since = seconds, datetime.now(UTC) - timedelta(seconds=seconds)
                    notify(
                        f"{server.address} has answered none of {counted(waiting, 'request')} since "
                        f"{since:%H:%M:%S} UTC, for {seconds:.0f} s now; each is given up after "
                        f"{server.tries * server.timeout:.0f} s"
                    )

    with _beside("silence of servers", watch):
        yield


@contextmanager
def _beside(name: str, watch: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `watch` in a thread while the block runs. It is given an event that is set when the block is over."""
    over = threading.Event()
    thread = threading.Thread(target=watch, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
