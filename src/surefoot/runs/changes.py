"""What a resumed run was given other than it had: said, kept in its events, and how to go on without.

A change that is `warned` makes another run of it from here on, often by oversight: the first start had overrides on its
command line, and the second one not. config.yaml then holds the new values, so the way back names the old ones.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from surefoot.config.dump import shown
from surefoot.config.resume_policy import Change
from surefoot.report.events import append_event, mend_events
from surefoot.runs.run_folder import CONFIG, Claim


def sentence(change: Change) -> str:
    return f"{change.key} changed from {shown(change.old)} to {shown(change.new)}: {change.why}"


def note_changes(found: Claim) -> None:
    """An event for each that is warned; before config.yaml is written anew, as nothing tells of them afterwards."""
    if not (warned := _warned(found)) or found.checkpoint is None:
        return
    mend_events(found.folder)
    for change in warned:
        append_event(found.folder, "changed", found.checkpoint.step, sentence(change))


def reminder(found: Claim, *, command: bool) -> list[str]:
    """Lines for right before the first step. command: whether a command line was given, so that one can answer."""
    if not command or not (warned := _warned(found)):
        return []
    return ["to go on as before, stop this one (Ctrl-C) and type:", f"  {_unchanged(found.folder, warned)}"]


def _warned(found: Claim) -> list[Change]:
    return [change for change in found.changes if change.policy == "warned"]


def _unchanged(run: Path, warned: Sequence[Change]) -> str:
    old = [f"{change.key}={shown(change.old)}" for change in warned]
    return shlex.join(["surefoot", "train", str(run / CONFIG), *old, "--resume"])
