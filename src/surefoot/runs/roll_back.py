"""`guard.rollback: on`: a run that its guard would end goes back to its last healthy checkpoint, and around the data.

All that is decided here is written down (`stages.rollback_record`). The run is then restored as a resumed one is, by
the same code: in the same process or, where that was killed, in the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from surefoot.config.schema import RunConfig
from surefoot.data.batch import RecordName
from surefoot.data.prepare import PreparedData
from surefoot.methods.method import Stage
from surefoot.methods.table import KINDS
from surefoot.planning.plan import RunPlan
from surefoot.report.wording import times
from surefoot.runs.rollback_record import Recorded, add_rollback, leads_to
from surefoot.system.errors import IntegrityError
from surefoot.training.checkpoint import Checkpoint, newest_verified, read_state
from surefoot.training.rollback import Rollback, StepsLost, data_step

MOST = 2  # of one run; who needs more has another trouble than its data


def make_stage(config: RunConfig, plan: RunPlan, data: PreparedData, rollbacks: Sequence[Rollback] = ()) -> Stage:
    """The data under a plan, in the order of a run with these rollbacks."""
    stage = KINDS[config.stage].stage(config, plan, data)
    if not rollbacks:
        return stage
    batches, places, order = stage.step_batches, stage.step_places, partial(data_step, tuple(rollbacks))
    return replace(
        stage,
        step_batches=lambda step: batches(order(step)),
        step_places=lambda step: places(order(step)),
        data_step=order,
    )


def roll_back(run: Path, data: Stage, rollbacks: Sequence[Rollback], error: StepsLost) -> Recorded | str:
    """Write down that the run goes back, and how; or say why it does not.

    data: the stage without rollbacks. rollbacks: those that have happened. Raises EnvironmentFault where the disk
    refuses.
    """
    if len(rollbacks) >= MOST:
        return f"guard.rollback: the run went back {times(len(rollbacks))} already, and ends here"
    checkpoint = _last_healthy(run, rollbacks)
    if checkpoint is None:
        return "guard.rollback: there is no healthy checkpoint to go back to"
    first = data_step(rollbacks, checkpoint.step + 1)
    following = data.begins_at(data_step(rollbacks, error.step) + 1)
    rollback = Rollback(checkpoint.step, error.step, following - (checkpoint.step + 1))
    why = error.faults[0]
    made = Recorded(rollback, _examples(data, range(first, following)), f"{why.where}: {why.what}")
    add_rollback(run, made)
    return made


def _last_healthy(run: Path, rollbacks: Sequence[Rollback]) -> Checkpoint | None:
    def fit(checkpoint: Checkpoint) -> bool:
        return leads_to(rollbacks, checkpoint) and read_state(checkpoint).is_healthy

    try:
        return newest_verified(run, fit)[0]
    except IntegrityError:
        return None


def _examples(data: Stage, steps: Sequence[int]) -> tuple[RecordName, ...]:
    """Of these steps, each once, in their order."""
    names = (name for step in steps for batch in data.step_batches(step) for name in batch.examples)
    return tuple(dict.fromkeys(names))
