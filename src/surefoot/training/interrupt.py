"""What signals ask of a running loop.

Ctrl-C and SIGTERM: stop. The first asks, and the loop saves and leaves after the step at hand; the second restores the
default action and raises the signal again, so the process ends as the sender expects. There are no child processes to
leave behind. SIGUSR1: save now. SIGUSR2: evaluate now. Both after the step at hand, and the run goes on.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_STOP = (signal.SIGINT, signal.SIGTERM)
_WISHES = {
    getattr(signal, name): (what, doing)  # Windows has neither
    for name, what, doing in (("SIGUSR1", "save", "saving"), ("SIGUSR2", "evaluate", "evaluating"))
    if hasattr(signal, name)
}


class StopRequest:
    """Context manager. On another thread than the main one, which alone hears signals, nothing is ever asked."""

    def __init__(self) -> None:
        self.requested: str | None = None  # name of the signal that asked to stop
        self._wishes: set[str] = set()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._stop) for number in _STOP}
            self._previous |= {number: signal.signal(number, self._wish) for number in _WISHES}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def take_wishes(self) -> frozenset[str]:
        """What was asked for since the last call, besides stopping: "save", "evaluate"."""
        taken, self._wishes = frozenset(self._wishes), set()
        return taken

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.requested = signal.Signals(number).name
        _say(f"{self.requested}: stopping after this step; send it again to stop now")

    def _wish(self, number: int, frame: FrameType | None) -> None:
        what, doing = _WISHES[number]
        self._wishes.add(what)
        _say(f"{signal.Signals(number).name}: {doing} after this step")


def _say(text: str) -> None:
    """By os.write, because the interrupted code may hold the lock of a buffered stream."""
    os.write(2, f"\n{text}\n".encode())
