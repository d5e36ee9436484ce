"""Run a command as several processes, and leave none behind.

    code = start_ranks(2, ["train", "run.yaml"], Path("runs/a"))

With several machines the same command runs on each, and ranks are numbered through: machine 1 of two with eight
processes each starts 8 to 15.

Each child runs `python -m surefoot` with the same arguments and reads its rank from the environment. Rank 0 writes to
the screen. The output of the others goes to ranks/rank-N.log once the run folder exists; only their error lines also
reach the screen, and the ranks agree on which one prints an error. Every signal is forwarded once to all ranks. When
one child fails, the others have some seconds to report why and to end; then they are killed, even if they are stopped.
If this process is killed, the children end too: the kernel sees to it on Linux, elsewhere they poll.

The trade-off: this process does not import torch, so it starts fast and uses little memory, but what a run was doing
when it failed is known only to the remaining ranks.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from surefoot.commands.terminal import echo
from surefoot.system import durable, hardware, process
from surefoot.system.errors import EnvironmentFault

_GRACE = 20.0  # seconds for the other ranks to report why the first one failed
_AFTER_ERROR = 5.0  # seconds for them to end after one has printed its error
_DYING = 10.0  # seconds for the kernel to remove a killed process
_POLL = 0.05
_ERROR = re.compile(rb"(.*: )?(internal )?error: ")
_UNWRITTEN = 1 << 20  # bytes of output kept until the run folder exists


def start_ranks(count: int, words: Sequence[str], run: Path, machines: process.Machines | None = None) -> int:
    """Run `surefoot *words` on several ranks and return the exit code of the run.

    count: number of ranks on this machine.
    words: the arguments after `surefoot`.
    run: the run folder, which need not exist yet.
    machines: this one's place among several; None: it is the only one.
    """
    machines = machines or process.Machines(1, 0, "127.0.0.1", _free_port())
    threads = max(1, hardware.usable_cores() // count)
    command = [sys.executable, "-m", "surefoot", *words]
    first = machines.index * count
    children = [
        _Child(first + local, command, process.rank_environment(local, count, machines, threads), run)
        for local in range(count)
    ]
    with _Signals(children) as signals:
        try:
            return _wait(children, signals)
        finally:
            # Also after our own errors: a rank that waits for another one in a collective would wait forever.
            for child in children:
                child.kill()
            for child in children:
                child.await_end()
                child.finish()


def _wait(children: Sequence[_Child], signals: _Signals) -> int:
    """Wait until all ranks have ended, or until some seconds after the first failure."""
    first: _Child | None = None
    failed = 0.0
    while any(child.code is None for child in children):
        if first is None:
            first, failed = next((child for child in children if child.code), None), time.monotonic()
        elif time.monotonic() - failed > (_AFTER_ERROR if any(child.printed_error for child in children) else _GRACE):
            break
        time.sleep(_POLL)
    first = first or next((child for child in children if child.code), None)
    if first is None:
        return 0
    assert first.code is not None
    if first.code < 0 and signals.number is not None:  # before the loop installed its handler
        return 128 + signals.number
    if first.code > 0:
        return first.code
    for child in children:
        child.finish()
    if not any(child.printed_error for child in children):
        what = f"was ended by {_signal_name(-first.code)}; the last checkpoint is untouched, continue with --resume"
        echo(f"error: rank {first.rank} (pid {first.process.pid}) {what}", err=True)
    return EnvironmentFault.exit_code


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _free_port() -> int:
    """A free port. If another program takes it before rank 0 listens, the ranks end with torch's error before step
    1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class _Child:
    """One rank's process. printed_error: whether an error of it reached the screen."""

    def __init__(self, rank: int, command: Sequence[str], environment: Mapping[str, str], run: Path):
        self.rank, self.printed_error = rank, False
        self._killed = False
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # Ctrl-C on the terminal reaches only the launcher, which forwards it once.
            process_group=None if sys.platform == "win32" else 0,
        )
        log = _Log(run / "ranks" / f"rank-{rank}.log") if rank else None
        streams = [self.process.stdout, self.process.stderr]
        self._threads = [
            threading.Thread(target=self._pass_on, args=(stream, stream is self.process.stderr, log), daemon=True)
            for stream in streams
            if stream is not None
        ]
        for thread in self._threads:
            thread.start()

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def send(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        if self.code is None:
            self.process.kill()  # works on a stopped process, too

    def await_end(self) -> None:
        """Wait until the kernel has released what the process held, such as GPU memory that the next run needs."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_DYING)

    def finish(self) -> None:
        """Wait until all its output has been forwarded."""
        if self.code is not None:
            for thread in self._threads:
                thread.join(timeout=2)  # a grandchild may keep the pipe open

    def _pass_on(self, stream: IO[bytes], errors: bool, log: _Log | None) -> None:
        for line in iter(stream.readline, b""):
            is_error = errors and _ERROR.match(line) is not None
            self.printed_error = self.printed_error or is_error
            if log is not None:
                log.write(line)
            if log is None or is_error:
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()


class _Log:
    """A log file in the run folder. Output is buffered until the run has written its plan, so that a folder which the
    run refuses stays unchanged. Write errors are ignored."""

    def __init__(self, path: Path):
        self._path, self._waiting, self._lock, self._started = path, bytearray(), threading.Lock(), time.time()

    def write(self, line: bytes) -> None:
        with self._lock:
            self._waiting += line
            del self._waiting[:-_UNWRITTEN]
            if self._has_plan():
                with suppress(EnvironmentFault, OSError):
                    durable.make_folders(self._path.parent)
                    durable.append_lines(self._path, *self._waiting.decode("utf-8", "replace").splitlines())
                self._waiting.clear()

    def _has_plan(self) -> bool:
        """Whether the plan was written after this launcher started."""
        plan = self._path.parent.parent / "plan.json"
        return plan.is_file() and plan.stat().st_mtime >= self._started


class _Signals:
    """Forwards SIGINT, SIGTERM, SIGUSR1 (save) and SIGUSR2 (evaluate) to all ranks. number: the first signal that asked
    to stop."""

    def __init__(self, children: Sequence[_Child]):
        self._children = children
        self.number: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> _Signals:
        names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2")
        numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._pass_on) for number in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGINT, signal.SIGTERM):
            self.number = self.number or number
        for child in self._children:
            child.send(number)
