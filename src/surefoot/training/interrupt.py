"""Ctrl-C and SIGTERM: the first asks, the second stops at once.

The loop looks at `requested` after each step, saves and leaves. The second signal restores the default action and
raises the signal again, so the process ends as the sender expects. There are no child processes to leave behind.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Context manager. On another thread than the main one, which alone hears signals, nothing asks to stop."""

    def __init__(self) -> None:
        self.requested: str | None = None  # name of the signal that asked
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.requested = signal.Signals(number).name
        # os.write, because the interrupted code may hold the lock of a buffered stream.
        os.write(2, f"\n{self.requested}: stopping after this step; send it again to stop now\n".encode())
