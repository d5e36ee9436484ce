"""How the last process of a run ended if it recorded no end: killed, crashed in native code, or failed by a device or
another rank.

A process that ends by itself records it in events.jsonl. Otherwise flight.jsonl has the step that was being computed,
and run.log where Python was if native code crashed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.report import journal
from surefoot.report.crash_trace import CrashTrace, trace_at_end
from surefoot.report.events import EVENTS, last_of_the_process
from surefoot.report.flight import recent, unfinished
from surefoot.system import folder_lock
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
