"""Calls of environments: many at once, each within its time.

A call runs in a thread, because an environment may be anything: a function, a program, a remote server. A thread cannot
be ended from outside, so a call that takes too long is abandoned and its result is ignored. Signals, which could
interrupt it, only work in the main thread (verl#5635).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

AT_ONCE = 64  # calls under way
Said = TypeVar("Said")


@dataclass(frozen=True)
class Call(Generic[Said]):
    """A call to make.

    do: makes it.
    seconds: its time limit.
    heard: called once with what it said, what it raised or `Late`, before anything else is done with that.
    late: called by the thread of a call that was `Late`, once it has returned after all.
    """

    do: Callable[[], Said]
    seconds: float
    heard: Callable[[Said | BaseException], None]
    late: Callable[[], None] = lambda: None


class Late(TimeoutError):
    """A call that has taken too long. Its thread may still be in it."""


def in_time(calls: Sequence[Call[Said]], waiting: Callable[[Sequence[int]], None]) -> list[Said | BaseException]:
    """Make the calls; return what each said, what it raised, or `Late`. Raises what `heard` raises.

    waiting: told the indices of the calls under way whenever they change.
    """
    found: dict[int, Said | BaseException] = {}
    unheard: list[Exception] = []
    under_way: set[int] = set()
    lock = threading.Lock()

    def hear(number: int, said: Said | BaseException) -> bool:
        """Return whether it is the first about this call."""
        with lock:
            if number in found:
                return False
            found[number] = said
            under_way.remove(number)
            waiting(sorted(under_way))
            try:
                calls[number].heard(said)
            except Exception as error:  # the caller's, such as a full disk: in a thread nobody would see it
                unheard.append(error)
            return True

    def run(number: int) -> None:
        said: Said | BaseException
        try:
            said = calls[number].do()
        except BaseException as error:  # SystemExit as well: an environment's end is not the run's
            said = error
        if not hear(number, said):
            with suppress(Exception):
                calls[number].late()

    for start in range(0, len(calls), AT_ONCE):
        numbers = range(start, min(start + AT_ONCE, len(calls)))
        # Daemons: one that hangs must not keep the process from ending.
        threads = {number: threading.Thread(target=run, args=(number,), daemon=True) for number in numbers}
        under_way.update(numbers)
        waiting(numbers)
        began = time.monotonic()
        for thread in threads.values():
            thread.start()
        for number, thread in threads.items():
            thread.join(max(0.0, began + calls[number].seconds - time.monotonic()))
            hear(number, Late(f"no answer within {calls[number].seconds:g} s"))
        if unheard:
            raise unheard[0]
    return [found[number] for number in range(len(calls))]
