"""`rollbacks.json` of a run folder: where the run went back to, why, and which examples it has skipped since.

It is written before anything else of a rollback happens; from there on the run is one that is resumed. Checkpoints that
were written after the step that it goes back to are passed over, and set aside as damaged ones are. The record is
sealed, because it says which data a step learns from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from surefoot.data.batch import RecordName
from surefoot.report.events import note_once
from surefoot.runs.sealed_record import read_sealed
from surefoot.system import durable
from surefoot.system.errors import Fault, IntegrityError
from surefoot.training.checkpoint import Checkpoint, newest_verified, read_state
from surefoot.training.manifest import sealed
from surefoot.training.report import example_list
from surefoot.training.rollback import Rollback, is_on_the_way

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
    told = [asdict(other) for other in (*read_rollbacks(run), one)]
    durable.write_json(run / RECORD, sealed({"rollbacks": told}))


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
