"""How the last process of a run ended, where it did so without a word or left no record of it: killed, by native code
that crashed, by a device or another rank that failed.

A process that ends by itself says so in events.jsonl. One that says nothing has left in flight.jsonl the step that it
was computing, and in run.log where Python was, if native code ended it.
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
_WORDS = 200  # letters of a last word


@dataclass(frozen=True)
class Death:
    """How the last process of a run ended without saying so.

    step: the one that was being computed, None between two.
    done: the last one that was done.
    begun: the line of flight.jsonl.
    trace: None where the process left none, as by SIGKILL.
    error: what it could still say of it.
    """

    step: int | None
    done: int
    begun: dict[str, Any]
    trace: CrashTrace | None
    error: str = ""

    def __str__(self) -> str:
        where = f"during step {self.step}" if self.step else f"after step {self.done}, in no step"
        return f"the last process died {where} ({self.error or self.trace or 'it left no trace, as after SIGKILL'})"


def find_death(run: Path) -> Death | None:
    """None where the last process ended by itself, with a record of what it could not do, or there was none. The run's
    lock is the caller's business."""
    events = journal.salvage(run / EVENTS)[0]
    line, done, end = unfinished(run), recent(run), last_of_the_process(events)
    step = line["begins"] if line else None
    error = ""
    if end == "failed" and step is not None and newest_failure(run, step) is None:  # a device, or another rank
        error = str(events[-1].get("text", ""))[:_WORDS]
    # Every other end was noted by the process itself, with its reason.
    elif end not in ("start", "resume"):
        return None
    last = done[-1].get("step") if done else 0
    return Death(step, last if isinstance(last, int) else 0, line or {}, trace_at_end(run / LOG), error)


def resumed_sentence(death: Death, run: Path, start: int) -> str:
    """For the process that goes on. start: step of the checkpoint that it goes on from, 0 for none."""
    again = f"; should that step end it too, `surefoot replay {run}` runs it alone" if death.step else ""
    return f"{death}; this one goes on from {f'checkpoint-{start}' if start else 'the base model'}{again}"


def death_in_a_step(run: Path) -> Death:
    """Raises InputError where there is none that could be computed again, and says why."""
    if folder_lock.is_in_use(run):
        fix = f"replay its last step when that has ended; where none is, delete {run / LOCK}"
        raise InputError(Fault(str(run), "a process is at work in it", fix, code="SF-FOLDER-BUSY"))
    death = find_death(run)
    if death is None:
        kept = failures_in(run)
        fix = f"what it recorded is in {kept[-1]}: replay that" if kept else "there is no step to replay"
        raise InputError(Fault(str(run), "its last process ended by itself, or it had none", fix, code="SF-REPLAY"))
    if death.step is None:
        what = f"{death}: in an evaluation, a checkpoint, or the making of the next step's batches"
        raise InputError(Fault(str(run), what, "go on with --resume; there is no step to replay", code="SF-REPLAY"))
    return death
