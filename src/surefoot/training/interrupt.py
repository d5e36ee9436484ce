"""What signals ask of a running loop.

Ctrl-C and SIGTERM: stop. The first asks, and the loop saves and leaves after the current step; the second restores the
default action and raises the signal again, so the process ends as the sender expects. SIGUSR1: save now. SIGUSR2:
evaluate now. Both after the current step, and the run goes on.

Where several ranks make one run, a signal may reach any of them, in the middle of anything: it counts once all have
agreed on it, which they do at the same places of the loop.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

_STOP = (signal.SIGINT, signal.SIGTERM)
_WISHES = {
    getattr(signal, name): (what, doing)  # Windows has neither
    for name, what, doing in (("SIGUSR1", "save", "saving"), ("SIGUSR2", "evaluate", "evaluating"))
    if hasattr(signal, name)
}


class StopRequest:
    """Context manager. Python delivers signals to the main thread alone; on another one nothing is ever requested.

    totals: adds numbers up over the ranks; None in one process, where a signal counts at once.
    """

    def __init__(self, totals: Callable[[Sequence[float]], list[float]] | None = None) -> None:
        self._totals = totals
        self._signal: str | None = None
        self._agreed: str | None = None
        self._wishes: set[str] = set()
        self._agreed_wishes: set[str] = set()
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._stop) for number in _STOP}
            self._previous |= {number: signal.signal(number, self._wish) for number in _WISHES}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> str | None:
        """Name of the signal that asked to stop."""
        return self._signal if self._totals is None else self._agreed

    def ask(self, name: str) -> None:
        """Stop after the current step, as that signal would have it."""
        self._signal = name

    def agree(self) -> None:
        """Take over what was requested on any rank. Every rank must call it, at the same place."""
        if self._totals is None:
            return
        own, self._wishes = self._wishes, set()
        names = sorted(what for what, _ in _WISHES.values())
        stop, *wishes = self._totals([float(self._signal is not None), *(float(name in own) for name in names)])
        if stop:
            self._agreed = self._signal or "a signal to another rank"
        self._agreed_wishes |= {name for name, count in zip(names, wishes, strict=True) if count}

    def take_wishes(self) -> frozenset[str]:
        """What was requested since the last call, besides stopping: "save", "evaluate"."""
        if self._totals is None:
            taken, self._wishes = frozenset(self._wishes), set()
        else:
            taken, self._agreed_wishes = frozenset(self._agreed_wishes), set()
        return taken

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            _say(f"{signal.Signals(number).name} again: ended at once; --resume goes on from the last whole checkpoint")
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.ask(signal.Signals(number).name)
        _say(f"{self._signal}: stopping after this step; send it again to stop now")

    def _wish(self, number: int, frame: FrameType | None) -> None:
        what, doing = _WISHES[number]
        self._wishes.add(what)
        _say(f"{signal.Signals(number).name}: {doing} after this step")


def _say(text: str) -> None:
    """By os.write, because the interrupted code may hold the lock of a buffered stream."""
    os.write(2, f"\n{text}\n".encode())
