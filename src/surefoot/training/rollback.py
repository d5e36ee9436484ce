"""Going back to a checkpoint and around the data that ended the run: which step then learns from which data.

The order of the data stays what seed and step make it. A rollback moves the place: after the checkpoint, step n learns
from what step n + `ahead` would have had. That is a function of the list of rollbacks and the step, so a run that is
killed and resumed has no position to lose here either; the list is part of `RunState`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.system.errors import Diverged, Fault


@dataclass(frozen=True)
class Rollback:
    """back_to: step of the checkpoint. lost: the step that ended the run. ahead: steps after `back_to` learn from the
    data of so many steps later, until a later rollback says otherwise."""

    back_to: int
    lost: int
    ahead: int


def data_step(rollbacks: Sequence[Rollback], step: int) -> int:
    """The step whose data `step` learns from, both from 1: by the last rollback that goes back to before it."""
    last = _last_before(rollbacks, step)
    return step + (last.ahead if last else 0)


def counted_from(rollbacks: Sequence[Rollback], step: int) -> int:
    """The step after which non-finite ones count against the run, seen from `step`: where it last went back to. Those
    before led to that, or have been lived with; counted again, the next one would end the run that was to go on."""
    last = _last_before(rollbacks, step)
    return last.back_to if last else 0


def _last_before(rollbacks: Sequence[Rollback], step: int) -> Rollback | None:
    return next((one for one in reversed(rollbacks) if one.back_to < step), None)


def is_on_the_way(step: int, known: Sequence[Rollback], rollbacks: Sequence[Rollback]) -> bool:
    """Whether a run with these rollbacks comes by the state that was saved after `step` when those in `known` had
    happened: it lies before each of the further ones."""
    return tuple(known) == tuple(rollbacks[: len(known)]) and all(
        step <= one.back_to for one in rollbacks[len(known) :]
    )


class StepsLost(Diverged):
    """The guard ends the run at `step`; weights and moments are those before the steps that were not finite."""

    def __init__(self, fault: Fault, step: int):
        super().__init__(fault)
        self.step = step
