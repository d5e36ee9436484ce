"""Signals that control a running training loop.

Ctrl-C and SIGTERM stop the run: after the first, the loop saves and returns after the current step; a second restores
the default handler and re-raises the signal, so the process ends as the sender expects. SIGUSR1 saves a checkpoint and
SIGUSR2 evaluates, both after the current step, and the run continues.

With several ranks, a signal may reach any of them at any time. It takes effect once all ranks have agreed on it, at the
same point of the loop. A rank that it reaches gives up its requests to servers at once: it would wait for minutes for
one that does not answer.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

_STOP = (signal.SIGINT, signal.SIGTERM)
_REQUESTS = {
    getattr(signal, name): (what, doing)  # Windows has neither
    for name, what, doing in (("SIGUSR1", "save", "saving"), ("SIGUSR2", "evaluate", "evaluating"))
    if hasattr(signal, name)
}


class StopRequest:
    """Context manager that handles the signals. Python delivers signals only to the main thread; in another thread
    nothing is ever requested.

    totals: sums host numbers over the ranks; None in a single process, where a signal takes effect at once.
    """

    def __init__(self, totals: Callable[[Sequence[float]], list[float]] | None = None) -> None:
        self._totals = totals
        self._signal: str | None = None
        self._agreed: str | None = None
        self._requests: set[str] = set()
        self._agreed_requests: set[str] = set()
        self._previous: dict[int, object] = {}
        self._give_up: Callable[[], None] = lambda: None

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._stop) for number in _STOP}
            self._previous |= {number: signal.signal(number, self._request) for number in _REQUESTS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> str | None:
        """Name of the signal that requested a stop, or None."""
        return self._signal if self._totals is None else self._agreed

    def request(self, name: str) -> None:
        """Request a stop after the current step, as the signal `name` would."""
        self._signal = name
        # In a thread: the interrupted code may hold a lock that it takes.
        threading.Thread(target=self._give_up, daemon=True).start()

    def gives_up(self, give_up: Callable[[], None]) -> None:
        """Call this in another thread when a stop is requested."""
        self._give_up = give_up
        if self._signal is not None:
            self.request(self._signal)

    def agree(self) -> None:
        """Share the requests of all ranks. Collective: every rank must call it at the same point."""
        if self._totals is None:
            return
        own, self._requests = self._requests, set()
        names = sorted(what for what, _ in _REQUESTS.values())
        stop, *requests = self._totals([float(self._signal is not None), *(float(name in own) for name in names)])
        if stop:
            self._agreed = self._signal or "a signal to another rank"
        self._agreed_requests |= {name for name, count in zip(names, requests, strict=True) if count}

    def take_requests(self) -> frozenset[str]:
        """Return and clear the requests other than stopping: "save", "evaluate"."""
        if self._totals is None:
            taken, self._requests = frozenset(self._requests), set()
        else:
            taken, self._agreed_requests = frozenset(self._agreed_requests), set()
        return taken

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            name = signal.Signals(number).name
            _say(f"{name} again: stopped immediately; --resume continues from the last complete checkpoint")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.request(signal.Signals(number).name)
        _say(f"{self._signal}: stopping after this step; send it again to stop immediately")

    def _request(self, number: int, frame: FrameType | None) -> None:
        what, doing = _REQUESTS[number]
        self._requests.add(what)
        _say(f"{signal.Signals(number).name}: {doing} after this step")


def _say(text: str) -> None:
    """Print with os.write, because the interrupted code may hold the lock of a buffered stream."""
    os.write(2, f"\n{text}\n".encode())
