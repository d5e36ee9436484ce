"""Hands every row to every tracker, each in a thread of its own, so that none of them can stop or slow a step.

The thread starts its tracker, too: a dead server can take minutes to say so, and the run waits a while only. A failure
is said once. The rows that could not be handed over are kept and tried again with the next one; after
MOST_FAILURES in a row the tracker is left alone. The training log has every number in any case.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from surefoot.report.rows import Row
from surefoot.report.trackers.adapters import Numbers, RunFacts, Status, Tracker, numbers_of
from surefoot.system.redaction import redacted

MOST_FAILURES = 5
PATIENCE = 30.0  # seconds that the beginning and the end of a run wait for each tracker

_LONGEST = 200  # characters of a library's own message
Say = Callable[[str], None]


class Trackers:
    """A context manager around the training loop: entering starts the trackers, leaving tells them how it ended.

    trackers: by name.
    facts: without run_id.
    run_ids: of an earlier session, by tracker.
    say: told of failures. `ids` belongs into every checkpoint, so that a resumed run goes on in the same runs. It
        changes when a tracker comes late, with the next row, and in the caller's thread only.
    """

    def __init__(self, trackers: Mapping[str, Tracker], facts: RunFacts, run_ids: Mapping[str, str], say: Say):
        self.ids: dict[str, str] = dict(run_ids)
        self._trackers, self._facts, self._say = trackers, facts, say
        self._threads: list[_Thread] = []
        self._finished = False

    def __enter__(self) -> Trackers:
        for name, tracker in self._trackers.items():  # one by one: their imports are not made to run side by side
            thread = _Thread(name, tracker, replace(self._facts, run_id=self.ids.get(name)), self._say)
            self._threads.append(thread)
            if not thread.start(PATIENCE):
                self._say(f"{name} has not started within {PATIENCE:.0f} s; the run goes on, and rows wait for it")
        self._take_ids()
        return self

    def row(self, row: Row) -> None:
        """A row of the training log, as it was written."""
        self._take_ids()
        step, numbers = numbers_of(row)
        for thread in self._threads:
            thread.hand_over(step, numbers)

    def finished(self) -> None:
        """The run reached its end; without this call it counts as stopped."""
        self._finished = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        status: Status = "failed" if isinstance(error, Exception) else "finished" if self._finished else "stopped"
        for thread in self._threads:
            thread.finish(status)
        for thread in self._threads:
            if not thread.wait(PATIENCE):
                self._say(f"{thread.name} did not end within {PATIENCE:.0f} s and is left alone")

    def _take_ids(self) -> None:
        self.ids.update((thread.name, thread.id) for thread in self._threads if thread.id is not None)


class _Thread:
    """One tracker and the rows that it has not taken yet. id: that of its run, once it has started."""

    def __init__(self, name: str, tracker: Tracker, facts: RunFacts, say: Say):
        self.name, self._tracker, self._facts, self._say = name, tracker, facts, say
        self.id: str | None = None
        self._tried = threading.Event()
        self._queue: queue.SimpleQueue[tuple[int, Numbers] | Status] = queue.SimpleQueue()
        self._pending: list[tuple[int, Numbers]] = []
        self._failures, self._reported = 0, False
        # A daemon: a library that hangs in a call must not keep the process of a finished run alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self, seconds: float) -> bool:
        """Whether by then the tracker has started, or failed to."""
        self._thread.start()
        return self._tried.wait(seconds)

    def hand_over(self, step: int, numbers: Numbers) -> None:
        if self._thread.is_alive():  # else the tracker could not be started
            self._queue.put((step, numbers))

    def finish(self, status: Status) -> None:
        self._queue.put(status)

    def wait(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        try:
            self.id = self._tracker.start(self._facts)
        except Exception as error:  # a library may raise anything
            self._say(f"{self.name} could not be started and is left out: {_one_line(error)}")
            return
        finally:
            self._tried.set()
        while not isinstance(item := self._queue.get(), str):
            if self._failures < MOST_FAILURES:
                self._pending.append(item)
                self._attempt(self._send)
        if self._pending and self._failures < MOST_FAILURES:
            self._attempt(self._send)
        self._attempt(lambda: self._tracker.finish(item))

    def _send(self) -> None:
        while self._pending:
            self._tracker.log(*self._pending[0])
            self._pending.pop(0)  # only now: a row that failed stays first and is tried again
            self._failures = 0

    def _attempt(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._failures += 1
            if not self._reported:
                self._say(f"{self.name} failed; training goes on, and it is tried again: {_one_line(error)}")
                self._reported = True
            if self._failures == MOST_FAILURES:
                self._say(f"{self.name} failed {MOST_FAILURES} times in a row and is left alone")


def _one_line(error: Exception) -> str:
    """Type and message, without what looks like a key."""
    text = redacted(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:_LONGEST]}"
