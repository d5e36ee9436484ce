"""Calls of environments: many at once, each within its time.

A call runs in a thread, since an environment may be anything: a function, a program, a server far away. A thread cannot
be ended from outside, so a call that takes too long is left behind, and what it says later is not heard. Signals, which
could interrupt it, do nothing outside a main thread (verl#5635).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

AT_ONCE = 64  # calls under way
Said = TypeVar("Said")


@dataclass(frozen=True)
class Call(Generic[Said]):
    """A call to make.

    do: makes it.
    seconds: its time limit.
    heard: called with what it said, before anything else is done with it; never for one that took too long.
    """

    do: Callable[[], Said]
    seconds: float
    heard: Callable[[Said], None]


def in_time(calls: Sequence[Call[Said]], waiting: Callable[[Sequence[int]], None]) -> list[Said | BaseException]:
    """Make the calls; return what each said, what it raised, or a TimeoutError.

    waiting: told the indices of the calls under way whenever they change.
    """
    found: dict[int, Said | BaseException] = {}
    lock = threading.Lock()

    def run(number: int) -> None:
        said: Said | BaseException
        try:
            said = calls[number].do()
        except BaseException as error:  # SystemExit as well: an environment's end is not the run's
            said = error
        with lock:
            if number not in found:
                if not isinstance(said, BaseException):
                    calls[number].heard(said)
                found[number] = said

    for start in range(0, len(calls), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, len(calls)))
        # Daemons: one that hangs must not keep the process from ending.
        threads = {number: threading.Thread(target=run, args=(number,), daemon=True) for number in numbers}
        began = time.monotonic()
        for thread in threads.values():
            thread.start()
        for number, thread in threads.items():
            waiting([one for one in numbers if one not in found])
            thread.join(max(0.0, began + calls[number].seconds - time.monotonic()))
            with lock:
                found.setdefault(number, TimeoutError(f"no answer within {calls[number].seconds:g} s"))
    waiting([])
    return [found[number] for number in range(len(calls))]
