"""Record and read where Python was when native code crashed, with `faulthandler`.

    with CrashTraces() as traces:            # traces go to stderr
        with traces.into(run / "run.log"):   # traces go to the end of that file
            ...

The handler runs inside the signal and can only write to a file that is already open, so it uses an existing one.
SIGKILL (for example by the out-of-memory killer) cannot be caught.
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
_LONGEST = 1 << 18  # bytes read from the end of a file
_LINE = re.compile(r"|  .*|(Current thread|Thread|Extension modules:|C stack|<) ?.*|Fatal Python error: .*")
_FRAME = re.compile(
    r"^Current thread .*\n  File \"(?P<file>.*)\", line (?P<line>\d+) in (?P<function>.*)$", re.MULTILINE
)


class CrashTraces:
    """Context manager that enables faulthandler. An existing handler (`python -X faulthandler`) is kept."""

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
        """Write traces to the end of this file instead of stderr. Raises EnvironmentFault if it cannot be opened."""
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

    signal: its name, or Python's words for another fatal error.
    place: the innermost Python line of the crashed thread, empty if it ran none.
    """

    signal: str
    place: str

    def __str__(self) -> str:
        return f"{self.signal} in {self.place}" if self.place else self.signal


def trace_at_end(path: Path) -> CrashTrace | None:
    """Return the trace at the end of a file; None if other lines follow (of the next process) or it cannot be read."""
    try:
        text = plain_files.read_bytes(path)[-_LONGEST:].decode("utf-8", "replace")
    except OSError:
        return None
    before, head, after = text.rpartition(_HEAD)
    if not head or (before and not before.endswith("\n")):
        return None
    return read_trace(head + after) if all(map(_LINE.fullmatch, after.split("\n")[1:])) else None


def read_trace(text: str) -> CrashTrace | None:
    """Parse the last trace in a text."""
    _, head, after = text.rpartition(_HEAD)
    if not head:
        return None
    words = after.partition("\n")[0].strip()
    frame = _FRAME.search(after)
    place = f"{frame['function']}, line {frame['line']} of {frame['file']}" if frame else ""
    return CrashTrace(_SIGNALS.get(words, words), place)
