"""Names of the folders that record a failure, and those of a run. Without torch, as reports read it.

    failure-STEP               the step
    failure-STEP-batches       the making of its batches
    failure-STEP-memory        the stage's own state, updated after the step
    failure-STEP-evaluation    the evaluation after it

and `-rollback-N` behind each, after the run went back N times.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

from surefoot.training.manifest import MANIFEST

Phase = Literal["batches", "step", "memory", "evaluation"]  # of a step, in their order
_PHASES: tuple[Phase, ...] = get_args(Phase)
_STEP: Phase = "step"
_OTHERS = "|".join(phase for phase in _PHASES if phase != _STEP)
_NAME = re.compile(rf"failure-(?P<step>\d+)(-(?P<phase>{_OTHERS}))?(-rollback-(?P<rollbacks>\d+))?")


def failure_name(step: int, phase: Phase, rollbacks: int) -> str:
    name = f"failure-{step}" if phase == _STEP else f"failure-{step}-{phase}"
    return f"{name}-rollback-{rollbacks}" if rollbacks else name


def moment(step: int, phase: Phase) -> str:
    """What a run was doing, in words."""
    return {
        "batches": f"the making of step {step}'s batches",
        "step": f"step {step}",
        "memory": f"what the stage carries on from step {step}",
        "evaluation": f"the evaluation after step {step}",
    }[phase]


def failures_in(run: Path) -> list[Path]:
    """Those of a run folder, in the order in which the run came by them."""
    found = {path: name for path in run.glob("failure-*") if (name := _NAME.fullmatch(path.name))}
    whole = [path for path in found if (path / MANIFEST).is_file()]
    return sorted(whole, key=lambda path: _order(found[path]))


def newest_failure(run: Path, step: int) -> Path | None:
    """The newest of those, where it is of this step or a later one."""
    newest = next(reversed(failures_in(run)), None)
    named = _NAME.fullmatch(newest.name) if newest else None
    return newest if named and int(named["step"]) >= step else None


def _order(name: re.Match[str]) -> tuple[int, int, int]:
    phase: Phase = name["phase"] or _STEP  # type: ignore[assignment]
    return int(name["rollbacks"] or 0), int(name["step"]), _PHASES.index(phase)
