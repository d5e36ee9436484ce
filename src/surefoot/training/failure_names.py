"""Names of the folders that record a failure, `failure-STEP`, and those of a run. Without torch, as reports read it."""

from __future__ import annotations

import re
from pathlib import Path

from surefoot.training.manifest import MANIFEST

_NAME = re.compile(r"failure-(?P<step>\d+)(-rollback-(?P<rollbacks>\d+))?")


def failure_name(step: int, rollbacks: int) -> str:
    return f"failure-{step}-rollback-{rollbacks}" if rollbacks else f"failure-{step}"


def failures_in(run: Path) -> list[Path]:
    """Those of a run folder, in the order in which the run came by them."""
    found = {path: name for path in run.glob("failure-*") if (name := _NAME.fullmatch(path.name))}
    whole = [path for path in found if (path / MANIFEST).is_file()]
    return sorted(whole, key=lambda path: (int(found[path]["rollbacks"] or 0), int(found[path]["step"])))


def newest_failure(run: Path, step: int) -> Path | None:
    """The newest of those, where it is of this step or a later one."""
    newest = next(reversed(failures_in(run)), None)
    named = _NAME.fullmatch(newest.name) if newest else None
    return newest if named and int(named["step"]) >= step else None
