"""`guard.rollback: on`: instead of ending the run, the guard rolls it back to its last healthy checkpoint and skips
data.

`rollbacks.json` records where the run went back to, why, and which examples it skips. It is written before anything
else of a rollback happens, and sealed with a hash, because it decides which data a step uses. From then on the run is
restored like a resumed one, by the same code: in this process or, if that is killed, in the next. Checkpoints written
after the step that the run goes back to are ignored, and set aside like damaged ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from surefoot.data.batching.batch import RecordName
from surefoot.methods.method import Task
from surefoot.report.events import note_once
from surefoot.report.wording import times
from surefoot.runs.identity import read_sealed
from surefoot.system import durable
from surefoot.system.errors import Fault, IntegrityError
from surefoot.training.checkpoint import Checkpoint, newest_verified, read_state
from surefoot.training.guard import Rollback, StepsLost, data_step, is_on_the_way
from surefoot.training.manifest import sealed
from surefoot.training.report import example_list

MOST = 2  # per run; if more are needed, the data is not the cause


def roll_back(run: Path, data: Task, rollbacks: Sequence[Rollback], error: StepsLost) -> Recorded | str:
    """Record a rollback and return it; or return why there is none.

    data: the task without rollbacks.
    rollbacks: earlier rollbacks of the run.

    Raises EnvironmentFault if the disk cannot be written.
    """
    if len(rollbacks) >= MOST:
        return f"guard.rollback: the run went back {times(len(rollbacks))} already, and ends here"
    checkpoint = _last_healthy(run, rollbacks)
    if checkpoint is None:
        return "guard.rollback: there is no healthy checkpoint to go back to"
    # All data since the checkpoint is skipped, not only the last batch: which part caused it is unknown.
    first = data_step(rollbacks, checkpoint.step + 1)
    following = data.begins_at(data_step(rollbacks, error.step) + 1)
    rollback = Rollback(checkpoint.step, error.step, following - (checkpoint.step + 1))
    why = error.faults[0]
    made = Recorded(rollback, _examples(data, range(first, following)), f"{why.where}: {why.what}")
    # Written before anything else happens: a process killed from here on resumes with the same data.
    add_rollback(run, made)
    return made


def _last_healthy(run: Path, rollbacks: Sequence[Rollback]) -> Checkpoint | None:
    def fit(checkpoint: Checkpoint) -> bool:
        return leads_to(rollbacks, checkpoint) and read_state(checkpoint).is_healthy

    try:
        return newest_verified(run, fit)[0]
    except IntegrityError:
        return None


def _examples(data: Task, steps: Sequence[int]) -> tuple[RecordName, ...]:
    """Examples of these steps in order, without duplicates."""
    names = (name for step in steps for batch in data.step_batches(step) for name in batch.examples)
    return tuple(dict.fromkeys(names))


RECORD = "rollbacks.json"


@dataclass(frozen=True)
class Recorded:
    """A recorded rollback. examples: names of the skipped records. why: the guard's message."""

    rollback: Rollback
    examples: tuple[RecordName, ...]
    why: str

    @property
    def sentence(self) -> str:
        one = self.rollback
        back = f"went back from step {one.lost} to checkpoint-{one.back_to}"
        steps = f"steps {one.back_to + 1} to {one.lost} are repeated with the data that follows"
        skipped = f"{len(self.examples)} examples are skipped ({example_list(self.examples)}; all are in {RECORD})"
        return f"{back}: {steps}, {skipped}; {self.why}"


def read_rollbacks(run: Path) -> tuple[Recorded, ...]:
    """Read the rollbacks, first to last; empty without a record. Raises IntegrityError if the record was changed."""
    path = run / RECORD
    if not path.is_file():
        return ()
    return read_sealed(
        path,
        lambda content: tuple(
            Recorded(Rollback(**one["rollback"]), tuple(one["examples"]), one["why"]) for one in content["rollbacks"]
        ),
    )


def add_rollback(run: Path, one: Recorded) -> None:
    """Append a rollback durably. Raises EnvironmentFault if the disk cannot be written."""
    records = [asdict(other) for other in (*read_rollbacks(run), one)]
    durable.write_json(run / RECORD, sealed({"rollbacks": records}))


def note_rollbacks(run: Path) -> None:
    """Add every rollback to the events, also those whose process ended before it could."""
    for one in read_rollbacks(run):
        note_once(run, "rollback", one.rollback.back_to, one.sentence)


def find_checkpoint(run: Path) -> tuple[Checkpoint | None, list[Fault], tuple[Rollback, ...]]:
    """Return where a run resumes: the newest intact checkpoint consistent with its rollbacks, the faults of newer ones,
    and the rollbacks. Raises IntegrityError if there are checkpoints but none is usable."""
    rollbacks = tuple(one.rollback for one in read_rollbacks(run))
    if not rollbacks:
        checkpoint, rejected = newest_verified(run)
        return checkpoint, rejected, read_state(checkpoint).rollbacks if checkpoint else ()
    checkpoint, rejected = newest_verified(run, partial(leads_to, rollbacks))
    if checkpoint is None:
        step = min(one.back_to for one in rollbacks)
        what = f"the run went back to checkpoint-{step}, but neither that nor an older one exists"
        raise IntegrityError(
            Fault(
                str(run / RECORD),
                what,
                "restore the checkpoint, or start anew with --overwrite",
                code="SF-CHECKPOINT-NONE",
            )
        )
    return checkpoint, rejected, rollbacks


def leads_to(rollbacks: Sequence[Rollback], checkpoint: Checkpoint) -> bool:
    """Whether this verified checkpoint belongs to the history of a run with these rollbacks."""
    return is_on_the_way(checkpoint.step, read_state(checkpoint).rollbacks, rollbacks)
