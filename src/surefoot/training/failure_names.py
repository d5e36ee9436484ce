"""Names of failure folders, and the list of those in a run folder. Without torch, because reports import it.

    failure-STEP               the step itself
    failure-STEP-batches       making its batches
    failure-STEP-memory        updating the method's state after the step
    failure-STEP-evaluation    the evaluation after the step

with the suffix `-rollback-N` if the run had rolled back N times.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal, get_args

from surefoot.training.manifest import MANIFEST

Phase = Literal["batches", "step", "memory", "evaluation"]  # in the order in which a step runs them
_PHASES: tuple[Phase, ...] = get_args(Phase)
_STEP: Phase = "step"
_OTHERS = "|".join(phase for phase in _PHASES if phase != _STEP)
_NAME = re.compile(rf"failure-(?P<step>\d+)(-(?P<phase>{_OTHERS}))?(-rollback-(?P<rollbacks>\d+))?")


def failure_name(step: int, phase: Phase, rollbacks: int) -> str:
    name = f"failure-{step}" if phase == _STEP else f"failure-{step}-{phase}"
    return f"{name}-rollback-{rollbacks}" if rollbacks else name


def moment(step: int, phase: Phase) -> str:
    """Describe the phase of a step, for messages."""
    return {
        "batches": f"making the batches of step {step}",
        "step": f"step {step}",
        "memory": f"updating the method's state after step {step}",
        "evaluation": f"the evaluation after step {step}",
    }[phase]


def failures_in(run: Path) -> list[Path]:
    """List the complete failure folders of a run, in the order in which they happened."""
    found = {path: name for path in run.glob("failure-*") if (name := _NAME.fullmatch(path.name))}
    whole = [path for path in found if (path / MANIFEST).is_file()]
    return sorted(whole, key=lambda path: _order(found[path]))


def newest_failure(run: Path, step: int) -> Path | None:
    """Return the newest failure folder if it belongs to `step` or a later step, else None."""
    newest = next(reversed(failures_in(run)), None)
    named = _NAME.fullmatch(newest.name) if newest else None
    return newest if named and int(named["step"]) >= step else None


def _order(name: re.Match[str]) -> tuple[int, int, int]:
    phase: Phase = name["phase"] or _STEP  # type: ignore[assignment]
    return int(name["rollbacks"] or 0), int(name["step"]), _PHASES.index(phase)
