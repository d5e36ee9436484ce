"""The part of every rank but the first: the plan that the first one made, the data that it prepared, the same steps.

Nothing is measured twice, asked of the hub twice or written: what the first rank hands over settles what it may settle,
and what each rank reads for itself (data, base model) is compared with what the first one read.
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
    """The first rank's word to the others: go on with this."""
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


def hand_over_end(session: Session, code: int = 0) -> int:
    """The first rank's word to the others: there is nothing to do. Returns the code."""
    session.hand_over({_OVER: code})
    return code


def follow(
    config: RunConfig, session: Session, custom: Custom, console: Console, profile: ProfileOptions = NO_PROFILE
) -> int | None:
    """Returns the exit code, as the first rank's; None: steps were lost, and whether the run goes back the first rank
    says, to who follows again."""
    given = session.await_lead()
    if _OVER in given:
        return given[_OVER]
    with session.activity.during("reading the data"):
        run = prepare(config, _claimed(config, given), console, custom, commits_from_json(given["commits"]))
    _compare(run.identity, given["identity"])
    run, loaded, _ = load_and_check(run, session, custom, console)
    session.gather("share", loaded.share)
    try:
        with device_faults("training", config, run.plan):
            outcome = take_steps(run, loaded, session, custom, SilentObserver(), {}, profile)
    except StepsLost:  # the same on all ranks: it is judged by numbers that all have
        if config.guard.rollback == "off":
            raise
        loaded.engine.release()
        session.begin_anew()
        return None
    return STOPPED_EXIT_CODE if outcome.reason == "interrupted" else 0


def _claimed(config: RunConfig, given: Mapping[str, Any]) -> FolderState:
    """What the first rank found in the run folder, seen from here."""
    folder, step, plan = Path(config.output), given["step"], plan_from_json(given["plan"])
    if step is None:
        return FolderState(folder, given["mode"], plan=plan)
    for checkpoint in list_checkpoints(folder):
        if checkpoint.step == step:
            rollbacks = tuple(Rollback(**one) for one in given["rollbacks"])
            return FolderState(folder, given["mode"], checkpoint, plan=plan, rollbacks=rollbacks)
    what = f"the run goes on from step {step}, and {folder} has no such checkpoint here"
    raise EnvironmentFault(Fault("output", what, "put it on a disk that all machines share", code="SF-RANKS-DIFFER"))


def _compare(own: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """What is read here is what the first rank reads."""
    faults = [
        Fault(name, "is not what rank 0 reads", "give all machines the same files and versions", code="SF-RANKS-DIFFER")
        for name in first
        if own[name] != first[name]
    ]
    if faults:
        raise EnvironmentFault(faults)
