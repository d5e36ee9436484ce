"""A watchdog thread per rank, so that no rank waits forever for a rank that is gone.

Once per second it writes this rank's heartbeat to the store, over a connection of its own, and reads the heartbeats of
the next rank and of rank 0, which holds the store. These conditions end the run, on all ranks within seconds:

    absent    no heartbeat at all for MEETING seconds: the rank was not started or cannot connect
    gone      the process of a rank on this machine has ended without publishing a fault
    silent    no heartbeat for SILENT seconds: stopped, swapped out, or its machine is off
    stalled   steps are running, and the main thread of a rank has made no progress for too long while the others wait
              for it (`Activity.limit`)

and a fault published by another rank. The first fault in the store wins, so that one message is printed and all ranks
exit with its code. The process ends with `os._exit`, because a main thread blocked in a collective runs no Python code.
Finished files are safe on disk by then, and unfinished ones are removed.

Trade-off: a heartbeat needs the GIL, so a library that holds it for SILENT seconds makes the rank look stopped.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from surefoot.system import durable
from surefoot.system.errors import EnvironmentFault
from surefoot.training.activity import Activity, Heartbeat, is_gone

PERIOD = 1.0  # seconds between heartbeats
SILENT = 30.0
MEETING = 300.0  # seconds within which all ranks must start; torch's default timeout of a store
_PATIENCE = 25.0  # timeout for the store's answer, in seconds


class Watchdog:
    """The thread that ends this rank when the run cannot continue.

    launcher: process id of the launcher; this process exits when the launcher does.
    meeting: seconds within which all ranks must start.
    note: called with the reason why the run ends, for run.log.
    end: exits the process; replaced in tests.
    silent: seconds without heartbeat after which a rank is considered lost; None for SILENT.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        activity: Activity,
        *,
        launcher: int | None = None,
        meeting: float = MEETING,
        note: Callable[[str], None] = lambda line: None,
        end: Callable[[int], None] = os._exit,
        silent: float | None = None,
    ):
        self._store, self._rank, self._world, self._activity = store, rank, world, activity
        self._launcher, self._meeting, self.note, self._end = launcher, meeting, note, end
        self._silent = SILENT if silent is None else silent
        self._host = socket.gethostname()
        self._watched = sorted({0, (rank + 1) % world} - {rank})
        self._seen: dict[int, tuple[Heartbeat, float]] = {}
        self._awaited: dict[int, float] = {}  # rank that has not started yet -> time since when it is awaited
        self._known: dict[int, Heartbeat] = {}  # rank -> its last heartbeat, however old
        self._halt = threading.Event()
        self._answered = time.monotonic()
        # Daemons: one that is blocked in a dead store must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread; the first heartbeat is in the store when this returns."""
        self._store.set(_key(self._rank), self._activity.heartbeat().to_bytes().decode())
        self._answered = time.monotonic()
        self._thread.start()
        threading.Thread(target=self._guard, name="watchdog of the store", daemon=True).start()

    def meet(self) -> None:
        """Wait for the first heartbeats of the watched ranks, so that a rank that ends soon after can be named."""
        keys = {rank: _key(rank) for rank in self._watched}
        self._store.wait(list(keys.values()))
        for rank, key in keys.items():
            self._known.setdefault(rank, Heartbeat.from_bytes(self._store.get(key)))

    def stop(self) -> None:
        """Stop the thread, after a last heartbeat that says that this rank is done."""
        self._halt.set()
        self._thread.join(timeout=_PATIENCE)

    def _work(self) -> None:
        # A separate connection: on the main thread's, a heartbeat would queue behind a `wait` that lasts minutes.
        store = self._store.clone()  # pyright: ignore[reportAttributeAccessIssue]
        store.set_timeout(timedelta(seconds=_PATIENCE))
        looked = time.monotonic()
        while True:
            halt = self._halt.wait(PERIOD)
            # An orphan gets another parent: the launcher has ended.
            if self._launcher is not None and os.getppid() != self._launcher:
                self._leave(EnvironmentFault.exit_code)
            if time.monotonic() - looked > self._silent / 2:  # this process was suspended: its observations are stale
                self._seen.clear()
                self._awaited.clear()
            looked = time.monotonic()
            self._answered = looked
            try:
                store.set(_key(self._rank), self._activity.heartbeat().to_bytes().decode())
                if halt:
                    return
                line = self._fault_of_others(store) or self._stall(store)
                if line is not None:
                    own = RankFault(self._rank, EnvironmentFault.exit_code, (line,))
                    self._finish(publish_fault(store, own), store)
                elif (fault := published_fault(store)) is not None and fault.rank != self._rank:  # its own is raised
                    self._finish(fault, store)
            except RuntimeError:  # the type of every store error
                if halt:
                    return
                self._without_store()

    def _guard(self) -> None:
        """Detect a store whose process is suspended: requests to it block forever, whatever their timeout."""
        looked = time.monotonic()
        while not self._halt.wait(PERIOD):
            now = time.monotonic()
            if now - looked > self._silent / 2:
                self._answered = now  # this process itself was suspended
            looked = now
            if now - self._answered > min(_PATIENCE, self._silent):
                self._without_store()

    def _fault_of_others(self, store: Store) -> str | None:
        for rank in self._watched:
            now = time.monotonic()
            if not store.check([_key(rank)]):
                if now - self._awaited.setdefault(rank, now) > self._meeting:
                    what = f"did not connect within {self._meeting:.0f} s: not started, or it cannot reach the others"
                    return f"rank {rank} of {self._world} {what}"
                continue
            beat = Heartbeat.from_bytes(store.get(_key(rank)))
            self._known[rank] = beat
            before = self._seen.get(rank)
            if before is None or beat.number != before[0].number:
                self._seen[rank] = (beat, now)
            if beat.over:
                continue
            if is_gone(beat, self._host):
                # Read again: it may have reported that it is done between the read above and its exit.
                latest = Heartbeat.from_bytes(store.get(_key(rank)))
                if not latest.over:
                    return _line(rank, latest, "has ended without an error message", self._host)
            # By this rank's own clock: those of two machines may differ.
            elif now - self._seen[rank][1] > self._silent:
                what = f"has not responded for {self._silent:.0f} s: stopped, or disconnected"
                return _line(rank, beat, what, self._host)
        return None

    def _stall(self, store: Store) -> str | None:
        seconds = self._activity.stalled
        if seconds is None:
            return None
        beats = [Heartbeat.from_bytes(one) for one in store.multi_get([_key(rank) for rank in range(self._world)])]
        behind = slowest(beats)
        if not behind:
            return f"all ranks have been waiting for each other for {seconds:.0f} s, at step {beats[0].step}"
        what = f"has made no progress for {seconds:.0f} s while others wait"
        return _line(behind[0], beats[behind[0]], f"{what}, {beats[behind[0]].place}", self._host)

    def _without_store(self) -> None:
        """End the run when the store is gone. Ranks cannot agree on who prints; the last one does, as it watches rank
        0."""
        if self._halt.is_set():
            return
        time.sleep(PERIOD)  # a regular exit of the store's rank also ends the store; let its message come first
        first = self._known.get(0)
        if self._rank == self._world - 1:
            what = "is gone or does not respond"
            self._say(f"rank 0 {what}" if first is None else _line(0, first, what, self._host))
        self._leave(EnvironmentFault.exit_code)

    def _finish(self, fault: RankFault, store: Store) -> None:
        for line in fault.lines:
            if fault.rank == self._rank:
                self._say(line)
            else:
                self._note(line)
        self._leave(fault.code, store)

    def _leave(self, code: int, store: Store | None = None) -> None:
        durable.discard_unfinished()  # `os._exit` runs no clean-up
        if store is not None:
            with suppress(RuntimeError):
                mark_done(store, self._rank, self._world, LINGER)
        self._end(code)

    def _say(self, line: str) -> None:
        _print(line)
        self._note(line)

    def _note(self, line: str) -> None:
        with suppress(Exception):  # such as a full disk: nothing may keep this process from ending
            self.note(line)


def slowest(beats: Sequence[Heartbeat]) -> list[int]:
    """Return the ranks that are behind or, if all are at the same point, those that are not waiting in a collective
    while others are. Empty if nothing distinguishes the ranks."""
    least = min(beat.progress for beat in beats)
    for behind in (
        [rank for rank, beat in enumerate(beats) if beat.progress == least],
        [rank for rank, beat in enumerate(beats) if not beat.waiting],
    ):
        if 0 < len(behind) < len(beats):
            return behind
    return []


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _line(rank: int, beat: Heartbeat, what: str, host: str) -> str:
    step = f", at step {beat.step}" if beat.step else ""
    where = "" if beat.host == host else f" on {beat.host}"
    return f"rank {rank} (pid {beat.pid}{where}) {what}; it was {beat.doing}{step}"


def _print(line: str) -> None:
    """Print with os.write, because the main thread may hold the lock of a buffered stream."""
    os.write(2, f"error: {line}; continue with --resume\n".encode())


LINGER = 5.0  # seconds that the rank with the store waits, so that the others can read the fault
_FAULT = "fault"


@dataclass(frozen=True)
class RankFault:
    """A fault that ends the run: the rank, its exit code and the lines of its message."""

    rank: int
    code: int
    lines: tuple[str, ...]

    def to_text(self) -> str:
        return json.dumps([self.rank, self.code, self.lines])

    @classmethod
    def from_bytes(cls, data: bytes) -> RankFault:
        rank, code, lines = json.loads(data)
        return cls(rank, code, tuple(lines))


def publish_fault(store: Store, fault: RankFault) -> RankFault:
    """Publish a fault to all ranks; return the fault that was published first."""
    # Atomic in the store: set only if there is none, so that of two faults at once all ranks see the same.
    return RankFault.from_bytes(store.compare_set(_FAULT, "", fault.to_text()))


def published_fault(store: Store) -> RankFault | None:
    """Return the published fault, or None."""
    return RankFault.from_bytes(store.get(_FAULT)) if store.check([_FAULT]) else None


def mark_done(store: Store, rank: int, world: int, seconds: float) -> None:
    """Report that this rank no longer needs the store. Rank 0, which may hold it, waits up to `seconds` for the
    others."""
    store.set(f"over/{rank}", "")
    if rank == 0:
        store.wait([f"over/{other}" for other in range(world)], timedelta(seconds=seconds))
