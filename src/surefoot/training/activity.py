"""What a rank is doing: plain values written by the main thread and read by the watchdog, which shares them with
others.

Attribute assignment is atomic in Python, so the two threads need no lock.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import psutil

LEAST_LIMIT = 45.0  # lower bound of the limit, in seconds
_DISTRIBUTED = os.path.join("torch", "distributed")
SLOWER = 5.0  # the limit, as a multiple of the slowest step so far


@dataclass(frozen=True)
class Heartbeat:
    """State of a rank, published once per second.

    number: increases with every heartbeat.
    host, pid, born: machine, process id and start time, which identify the process.
    doing: current activity, for messages.
    step, ticks: progress of the main thread.
    place: function and file that the main thread is in.
    waiting: whether that is in torch.distributed.
    over: whether the rank is done.
    """

    number: int
    host: str
    pid: int
    born: float
    doing: str
    step: int
    ticks: int
    place: str
    waiting: bool
    over: bool

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Heartbeat:
        return cls(**json.loads(data))

    @property
    def progress(self) -> tuple[int, int]:
        return self.step, self.ticks


class Activity:
    """Activity of this rank. Steps have a time limit, except for the first, which loads and compiles; activities
    declared with `during` have none."""

    def __init__(self) -> None:
        self.doing, self.step, self.ticks, self.over = "starting", 0, 0, False
        self._steps, self._declared, self._slowest = 0, 0, 0.0
        self._since = self._step_began = time.monotonic()
        self._numbers = 0
        process = psutil.Process()
        self._who = (socket.gethostname(), process.pid, process.create_time())
        self._thread = threading.main_thread().ident

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """Declare an activity of the main thread that has no time limit."""
        before, self.doing = self.doing, what
        self._declared += 1
        try:
            yield
        finally:
            self._declared -= 1
            self.doing = before
            self.tick()
            self._step_began = self._since

    def begin_anew(self) -> None:
        """Treat the next step as the first again, after a rollback."""
        self._steps, self.doing, self.step = 0, "going back to a checkpoint", 0
        self.tick()

    def step_begins(self, step: int) -> None:
        """Record the start of optimizer step `step`."""
        now = time.monotonic()
        if self._steps:
            self._slowest = max(self._slowest, now - self._step_began)
        self._steps += 1
        self.doing, self.step, self.ticks = "training", step, 0
        self._since = self._step_began = now

    def tick(self) -> None:
        """Record progress of the main thread."""
        self.ticks += 1
        self._since = time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds without progress after which the rank counts as stalled."""
        return max(LEAST_LIMIT, SLOWER * self._slowest)

    @property
    def stalled(self) -> float | None:
        """Seconds since the last progress if they exceed the limit, else None."""
        seconds = time.monotonic() - self._since
        bounded = self._steps > 1 and not self._declared and not self.over
        return seconds if bounded and seconds > self.limit else None

    def heartbeat(self) -> Heartbeat:
        self._numbers += 1
        return Heartbeat(self._numbers, *self._who, self.doing, self.step, self.ticks, *self._place(), self.over)

    def _place(self) -> tuple[str, bool]:
        """Return where the main thread is, and whether it is waiting for other ranks there."""
        # Read from outside: the main thread may be blocked in a collective and cannot say where it is.
        frame = sys._current_frames().get(self._thread or 0)
        if frame is None:
            return "", False
        code = frame.f_code
        return f"{code.co_name} in {os.path.basename(code.co_filename)}", any(
            _DISTRIBUTED in one.f_code.co_filename for one in (frame, frame.f_back) if one is not None
        )


def is_gone(beat: Heartbeat, host: str) -> bool:
    """Whether the process of a heartbeat has ended; False if it is on another machine or cannot be inspected."""
    if beat.host != host:
        return False
    try:
        process = psutil.Process(beat.pid)
        if process.create_time() != beat.born:
            return True
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False
