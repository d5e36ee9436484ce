"""`guard.rollback: on`: a run that its guard would end goes back to its last healthy checkpoint, and around the data.

`rollbacks.json` says where the run went back to, why, and which examples it has skipped since. It is written before
anything else of a rollback happens, and sealed with a hash, because it decides which data a step learns from. From
there on the run is restored as a resumed one is, by the same code: in this process or, where that was killed, in the
next. Checkpoints written after the step that the run goes back to are passed over, and set aside as damaged ones are.
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

MOST = 2  # of one run; who needs more has another trouble than its data


def roll_back(run: Path, data: Task, rollbacks: Sequence[Rollback], error: StepsLost) -> Recorded | str:
    """Write down that the run goes back, and how; or say why it does not.

    data: the task without rollbacks.
    rollbacks: those that have happened.

    Raises EnvironmentFault where the disk refuses.
    """
    if len(rollbacks) >= MOST:
        return f"guard.rollback: the run went back {times(len(rollbacks))} already, and ends here"
    checkpoint = _last_healthy(run, rollbacks)
    if checkpoint is None:
        return "guard.rollback: there is no healthy checkpoint to go back to"
    # All data since the checkpoint are skipped, not the last batch alone: which of them hurt is not known.
    first = data_step(rollbacks, checkpoint.step + 1)
    following = data.begins_at(data_step(rollbacks, error.step) + 1)
    rollback = Rollback(checkpoint.step, error.step, following - (checkpoint.step + 1))
    why = error.faults[0]
    made = Recorded(rollback, _examples(data, range(first, following)), f"{why.where}: {why.what}")
    # On disk before anything else of it happens: a process that is killed from here on resumes on the same way.
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
    """Of these steps, each once, in their order."""
    names = (name for step in steps for batch in data.step_batches(step) for name in batch.examples)
    return tuple(dict.fromkeys(names))


RECORD = "rollbacks.json"


@dataclass(frozen=True)
class Recorded:
    """A rollback as it is written down. examples: those that are skipped, by record. why: the guard's words."""

    rollback: Rollback
    examples: tuple[RecordName, ...]
    why: str

    @property
    def sentence(self) -> str:
        one = self.rollback
        back = f"went back from step {one.lost} to checkpoint-{one.back_to}"
        steps = f"steps {one.back_to + 1} to {one.lost} are taken anew with the data that follow"
        skipped = f"{len(self.examples)} examples are skipped ({example_list(self.examples)}; all are in {RECORD})"
        return f"{back}: {steps}, {skipped}; {self.why}"


def read_rollbacks(run: Path) -> tuple[Recorded, ...]:
    """First to last; none where there is no record. Raises IntegrityError where it is not as it was written."""
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
    """On the disk when this returns. Raises EnvironmentFault where the disk refuses."""
    records = [asdict(other) for other in (*read_rollbacks(run), one)]
    durable.write_json(run / RECORD, sealed({"rollbacks": records}))


def note_rollbacks(run: Path) -> None:
    """Every rollback stands in the events, whenever the process ended that made it."""
    for one in read_rollbacks(run):
        note_once(run, "rollback", one.rollback.back_to, one.sentence)


def find_checkpoint(run: Path) -> tuple[Checkpoint | None, list[Fault], tuple[Rollback, ...]]:
    """Where a run goes on: the newest intact checkpoint that the way of its rollbacks comes by, what was wrong with
    newer ones, and the rollbacks. Raises IntegrityError where there are checkpoints and none will do."""
    rollbacks = tuple(one.rollback for one in read_rollbacks(run))
    if not rollbacks:
        checkpoint, rejected = newest_verified(run)
        return checkpoint, rejected, read_state(checkpoint).rollbacks if checkpoint else ()
    checkpoint, rejected = newest_verified(run, partial(leads_to, rollbacks))
    if checkpoint is None:
        step = min(one.back_to for one in rollbacks)
        what = f"the run went back to checkpoint-{step}, and neither that nor an older one is there"
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
    """Whether a run with these rollbacks comes by this checkpoint, which verifies."""
    return is_on_the_way(checkpoint.step, read_state(checkpoint).rollbacks, rollbacks)
