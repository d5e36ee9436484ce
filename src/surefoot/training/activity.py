"""What a rank is doing, for the others to know: a few plain values, written by the main thread, read by the watchdog.

Assigning an attribute is atomic in Python, so the two threads need no lock.
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

LEAST_LIMIT = 45.0  # seconds without progress that are never too many
_DISTRIBUTED = os.path.join("torch", "distributed")
SLOWER = 5.0  # times the slowest step so far


@dataclass(frozen=True)
class Heartbeat:
    """number grows with every beat.

    host, pid, born: by which a process on the same machine is known.
    doing: in words.
    step, ticks: how far its main thread has come.
    place: of that thread, function and file.
    waiting: whether that lies in torch.distributed.
    over: its part is done.
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
    """Of this rank. Steps are bounded in time after the first one, which loads and compiles; what is declared with
    `during` may take as long as it takes."""

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
        """What the main thread does in the block, at its own pace."""
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
        """The next step is a first one again."""
        self._steps, self.doing, self.step = 0, "going back to a checkpoint", 0
        self.tick()

    def step_begins(self, step: int) -> None:
        """This rank comes to optimizer step `step`."""
        now = time.monotonic()
        if self._steps:
            self._slowest = max(self._slowest, now - self._step_began)
        self._steps += 1
        self.doing, self.step, self.ticks = "training", step, 0
        self._since = self._step_began = now

    def tick(self) -> None:
        """The main thread got something done."""
        self.ticks += 1
        self._since = time.monotonic()

    @property
    def limit(self) -> float:
        """Seconds without progress that are too many."""
        return max(LEAST_LIMIT, SLOWER * self._slowest)

    @property
    def stalled(self) -> float | None:
        """Seconds since the last progress, where they are too many."""
        seconds = time.monotonic() - self._since
        bounded = self._steps > 1 and not self._declared and not self.over
        return seconds if bounded and seconds > self.limit else None

    def heartbeat(self) -> Heartbeat:
        self._numbers += 1
        return Heartbeat(self._numbers, *self._who, self.doing, self.step, self.ticks, *self._place(), self.over)

    def _place(self) -> tuple[str, bool]:
        """Where the main thread is, and whether it waits there for other ranks."""
        frame = sys._current_frames().get(self._thread or 0)
        if frame is None:
            return "", False
        code = frame.f_code
        return f"{code.co_name} in {os.path.basename(code.co_filename)}", any(
            _DISTRIBUTED in one.f_code.co_filename for one in (frame, frame.f_back) if one is not None
        )


def is_gone(beat: Heartbeat, host: str) -> bool:
    """Whether the process of that beat, on this machine, has ended; False where that cannot be seen from here."""
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
