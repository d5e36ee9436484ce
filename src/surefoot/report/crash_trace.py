"""Where Python was when native code ended its process, as `faulthandler` writes it: how it is asked for, and read.

    with CrashTraces() as traces:            # on stderr from here on
        with traces.into(run / "run.log"):   # in the run folder, at the end of that file, when it happens
            ...

The handler writes from within the signal, to a file that is open already, and can neither make one nor name it: so a
file that is there anyway gets it. SIGKILL, by which the kernel frees memory, cannot be heard by anybody.
"""

from __future__ import annotations

import faulthandler
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from surefoot.system import durable, plain_files

_STDERR = 2
_HEAD = "Fatal Python error: "
_SIGNALS = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Illegal instruction": "SIGILL",
    "Floating-point exception": "SIGFPE",
    "Floating point exception": "SIGFPE",
}
_LONGEST = 1 << 18  # bytes at the end of a file that are looked at
_LINE = re.compile(r"|  .*|(Current thread|Thread|Extension modules:|C stack|<) ?.*|Fatal Python error: .*")
_FRAME = re.compile(
    r"^Current thread .*\n  File \"(?P<file>.*)\", line (?P<line>\d+) in (?P<function>.*)$", re.MULTILINE
)


class CrashTraces:
    """Context manager. A handler that is there already, as by `python -X faulthandler`, stands."""

    def __enter__(self) -> CrashTraces:
        self._own = not faulthandler.is_enabled()
        if self._own:
            faulthandler.enable(_STDERR)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._own:
            faulthandler.disable()

    @contextmanager
    def into(self, path: Path) -> Iterator[None]:
        """In the block the end of that file gets it, in place of stderr. Raises EnvironmentFault where it cannot be
        written."""
        if not self._own:
            yield
            return
        with durable.held_open(path) as file:
            faulthandler.enable(file)
            try:
                yield
            finally:
                faulthandler.enable(_STDERR)


@dataclass(frozen=True)
class CrashTrace:
    """Where native code ended a process.

    signal: its name, or Python's words for another end.
    place: the innermost line of Python in the thread that crashed, empty where that ran none.
    """

    signal: str
    place: str

    def __str__(self) -> str:
        return f"{self.signal} in {self.place}" if self.place else self.signal


def trace_at_end(path: Path) -> CrashTrace | None:
    """What a file ends with; None where other lines follow, as those of the next process, and where it cannot be
    read."""
    try:
        text = plain_files.read_bytes(path)[-_LONGEST:].decode("utf-8", "replace")
    except OSError:
        return None
    before, head, after = text.rpartition(_HEAD)
    if not head or (before and not before.endswith("\n")):
        return None
    return read_trace(head + after) if all(map(_LINE.fullmatch, after.split("\n")[1:])) else None


def read_trace(text: str) -> CrashTrace | None:
    """The last trace in a text."""
    _, head, after = text.rpartition(_HEAD)
    if not head:
        return None
    words = after.partition("\n")[0].strip()
    frame = _FRAME.search(after)
    place = f"{frame['function']}, line {frame['line']} of {frame['file']}" if frame else ""
    return CrashTrace(_SIGNALS.get(words, words), place)
