"""How the last process of a run ended if it recorded no end: killed, crashed in native code, or failed by a device or
another rank.

A process that ends by itself records it in events.jsonl. Otherwise flight.jsonl has the step that was being computed,
and run.log where Python was if native code crashed.

`CrashTraces` has Python write where it was when native code crashes, with `faulthandler`:

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
from typing import Any

from surefoot.report import journal
from surefoot.report.events import EVENTS, last_of_the_process
from surefoot.report.flight import recent, unfinished
from surefoot.system import durable, folder_lock, plain_files
from surefoot.system.durable import LOCK
from surefoot.system.errors import Fault, InputError
from surefoot.training.failure_names import failures_in, newest_failure

LOG = "run.log"
_WORDS = 200  # characters of the error shown


@dataclass(frozen=True)
class Death:
    """The unrecorded end of a run's last process.

    step: the step being computed, None between two steps.
    done: the last completed step.
    begun: the line of flight.jsonl.
    trace: the crash trace; None if there is none, as after SIGKILL.
    error: the last recorded error.
    """

    step: int | None
    done: int
    begun: dict[str, Any]
    trace: CrashTrace | None
    error: str = ""

    def __str__(self) -> str:
        where = f"during step {self.step}" if self.step else f"after step {self.done}, between steps"
        return f"the last process died {where} ({self.error or self.trace or 'it left no trace, as after SIGKILL'})"


def find_death(run: Path) -> Death | None:
    """Return None if the last process ended by itself with a record, or there was none. The caller checks the run's
    lock."""
    events = journal.salvage(run / EVENTS)[0]
    line, done, end = unfinished(run), recent(run), last_of_the_process(events)
    step = line["begins"] if line else None
    error = ""
    if end == "failed" and step is not None and newest_failure(run, step) is None:  # a device or another rank failed
        error = str(events[-1].get("text", ""))[:_WORDS]
    # Every other end was recorded by the process itself, with its reason.
    elif end not in ("start", "resume"):
        return None
    last = done[-1].get("step") if done else 0
    return Death(step, last if isinstance(last, int) else 0, line or {}, trace_at_end(run / LOG), error)


def resumed_sentence(death: Death, run: Path, start: int) -> str:
    """Describe the death for the process that resumes. start: step of the checkpoint it resumes from, 0 for none."""
    again = f"; if that step ends it again, run `surefoot replay {run}`" if death.step else ""
    return f"{death}; this one continues from {f'checkpoint-{start}' if start else 'the base model'}{again}"


def death_in_a_step(run: Path) -> Death:
    """Return the death during a step. Raises InputError, with the reason, if there is no step to repeat."""
    if folder_lock.is_in_use(run):
        fix = f"wait until it has ended; if no process is running, delete {run / LOCK}"
        raise InputError(Fault(str(run), "a process is using this folder", fix, code="SF-FOLDER-BUSY"))
    death = find_death(run)
    if death is None:
        kept = failures_in(run)
        fix = f"replay {kept[-1]}, which it recorded" if kept else "there is no step to replay"
        raise InputError(Fault(str(run), "its last process ended by itself, or there was none", fix, code="SF-REPLAY"))
    if death.step is None:
        what = f"{death}: in an evaluation, a checkpoint, or the making of the next step's batches"
        raise InputError(Fault(str(run), what, "continue with --resume; there is no step to replay", code="SF-REPLAY"))
    return death


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
