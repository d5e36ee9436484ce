"""Send every row to every tracker, each in its own thread, so that none of them can stop or slow a step.

The thread also starts its tracker: a dead server can take minutes to fail, and the run waits only a while. A failure is
reported once. Rows that could not be sent are kept and tried again with the next one; after MOST_FAILURES in a row the
tracker is dropped. The training log has every number in any case.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

from surefoot.report.trackers.adapters import Numbers, RunFacts, Status, Tracker, numbers_of
from surefoot.report.trainer_log import Row
from surefoot.system.redaction import redacted

MOST_FAILURES = 5
PATIENCE = 30.0  # seconds to wait for each tracker at the start and the end of a run

_LONGEST = 200  # characters of a library's own message
Say = Callable[[str], None]


class Trackers:
    """A context manager around the training loop: entering starts the trackers, leaving tells them how it ended.

    trackers: by name.
    facts: without run_id.
    run_ids: of an earlier session, by tracker.
    say: called with messages about failures.

    `ids` must be stored in every checkpoint, so that a resumed run continues the same tracker runs. It changes when a
    tracker starts late, with the next row, and only in the caller's thread.
    """

    def __init__(self, trackers: Mapping[str, Tracker], facts: RunFacts, run_ids: Mapping[str, str], say: Say):
        self.ids: dict[str, str] = dict(run_ids)
        self._trackers, self._facts, self._say = trackers, facts, say
        self._threads: list[_Thread] = []
        self._finished = False

    def __enter__(self) -> Trackers:
        for name, tracker in self._trackers.items():  # one at a time: their imports are not thread-safe
            thread = _Thread(name, tracker, replace(self._facts, run_id=self.ids.get(name)), self._say)
            self._threads.append(thread)
            if not thread.start(PATIENCE):
                self._say(f"{name} has not started within {PATIENCE:.0f} s; the run continues and keeps its rows")
        self._take_ids()
        return self

    def row(self, row: Row) -> None:
        """Send a row of the training log, as it was written."""
        self._take_ids()
        step, numbers = numbers_of(row)
        for thread in self._threads:
            thread.hand_over(step, numbers)

    def finished(self) -> None:
        """Mark the run as finished; otherwise it counts as stopped."""
        self._finished = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        status: Status = "failed" if isinstance(error, Exception) else "finished" if self._finished else "stopped"
        for thread in self._threads:
            thread.finish(status)
        for thread in self._threads:
            if not thread.wait(PATIENCE):
                self._say(f"{thread.name} did not end within {PATIENCE:.0f} s and is dropped")

    def _take_ids(self) -> None:
        self.ids.update((thread.name, thread.id) for thread in self._threads if thread.id is not None)


class _Thread:
    """One tracker's thread and its unsent rows. id: the tracker's run id, once it has started."""

    def __init__(self, name: str, tracker: Tracker, facts: RunFacts, say: Say):
        self.name, self._tracker, self._facts, self._say = name, tracker, facts, say
        self.id: str | None = None
        self._tried = threading.Event()
        self._queue: queue.SimpleQueue[tuple[int, Numbers] | Status] = queue.SimpleQueue()
        self._pending: list[tuple[int, Numbers]] = []
        self._failures, self._reported = 0, False
        # A daemon thread, so that a hanging library does not keep the process of a finished run alive.
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def start(self, seconds: float) -> bool:
        """Wait; return whether the tracker has started or failed to."""
        self._thread.start()
        return self._tried.wait(seconds)

    def hand_over(self, step: int, numbers: Numbers) -> None:
        if self._thread.is_alive():  # otherwise the tracker failed to start
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
            self._say(f"{self.name} could not be started and is dropped: {_one_line(error)}")
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
            self._pending.pop(0)  # only after success: a failed row stays first and is tried again
            self._failures = 0

    def _attempt(self, do: Callable[[], None]) -> None:
        try:
            do()
        except Exception as error:
            self._failures += 1
            if not self._reported:
                self._say(f"{self.name} failed; training continues, and surefoot will try again: {_one_line(error)}")
                self._reported = True
            if self._failures == MOST_FAILURES:
                self._say(f"{self.name} failed {MOST_FAILURES} times in a row and is dropped")


def _one_line(error: Exception) -> str:
    """Type and message, without anything that looks like a key."""
    text = redacted(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text[:_LONGEST]}"
