"""The run on every rank but the first: same plan, same data, same steps.

These ranks do not measure, ask the hub or write anything. They take the first rank's decisions, and compare what they
read themselves (data, base model) with what the first rank read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.planning.plan import plan_from_json, plan_to_json
from surefoot.report.console import Console
from surefoot.report.observer import SilentObserver
from surefoot.runs.custom import Custom
from surefoot.runs.faults import device_faults
from surefoot.runs.prepare import prepare
from surefoot.runs.prepared import PreparedRun
from surefoot.runs.profiling import NO_PROFILE, ProfileOptions
from surefoot.runs.revisions import commits_from_json, commits_to_json
from surefoot.runs.run_folder import FolderState
from surefoot.runs.steps import load_and_check, take_steps
from surefoot.system.errors import STOPPED_EXIT_CODE, EnvironmentFault, Fault
from surefoot.training.checkpoint import list_checkpoints
from surefoot.training.guard import Rollback, StepsLost
from surefoot.training.session import Session

_OVER = "over"


def hand_over(session: Session, run: PreparedRun) -> None:
    """Send the first rank's plan to the other ranks."""
    existing = run.existing
    session.hand_over(
        {
            "plan": plan_to_json(run.plan),
            "mode": existing.mode,
            "step": existing.checkpoint.step if existing.checkpoint else None,
            "rollbacks": [asdict(one) for one in existing.rollbacks],
            "commits": commits_to_json(run.commits),
            "identity": run.identity,
        }
    )


def hand_over_end(session: Session) -> int:
    """Tell the other ranks that there is nothing to do. Returns the exit code."""
    session.hand_over({_OVER: 0})
    return 0


def follow(
    config: RunConfig, session: Session, custom: Custom, console: Console, profile: ProfileOptions = NO_PROFILE
) -> int | None:
    """Run this rank. Returns the exit code of the first rank, or None after lost steps: then call it again, and the
    first rank says whether the run is rolled back."""
    given = session.await_lead()
    if _OVER in given:
        return given[_OVER]
    with session.activity.during("reading the data"):
        run = prepare(config, _folder_state(config, given), console, custom, commits_from_json(given["commits"]))
    # Each rank has read the data itself: on another machine a path may lead to another file.
    _compare(run.identity, given["identity"])
    run, loaded, _ = load_and_check(run, session, custom, console)
    session.gather("share", loaded.share)
    try:
        with device_faults("training", config, run.plan):
            outcome = take_steps(run, loaded, session, custom, SilentObserver(), {}, profile)
    except StepsLost:  # raised on all ranks together, because all see the same values
        if config.guard.rollback == "off":
            raise
        loaded.engine.release()
        session.begin_anew()
        return None
    return STOPPED_EXIT_CODE if outcome.reason == "interrupted" else 0


def _folder_state(config: RunConfig, given: Mapping[str, Any]) -> FolderState:
    """Rebuild what the first rank found in the run folder."""
    folder, step, plan = Path(config.output), given["step"], plan_from_json(given["plan"])
    if step is None:
        return FolderState(folder, given["mode"], plan=plan)
    for checkpoint in list_checkpoints(folder):
        if checkpoint.step == step:
            rollbacks = tuple(Rollback(**one) for one in given["rollbacks"])
            return FolderState(folder, given["mode"], checkpoint, plan=plan, rollbacks=rollbacks)
    what = f"the run continues from step {step}, but on this machine {folder} has no such checkpoint"
    raise EnvironmentFault(Fault("output", what, "put it on a disk that all machines share", code="SF-RANKS-DIFFER"))


def _compare(own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raise EnvironmentFault if this rank reads something else than the first rank."""
    faults = [
        Fault(name, "differs from rank 0's", "give all machines the same files and versions", code="SF-RANKS-DIFFER")
        for name in first
        if own[name] != first[name]
    ]
    if faults:
        raise EnvironmentFault(faults)
