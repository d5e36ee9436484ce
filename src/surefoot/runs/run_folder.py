"""The run folder: locking, which names in it belong to the run, and what a run writes there before step 1.

    found = inspect_folder(config, mode)       # inspect and check: new, resume or overwrite; nothing is changed
    with lock_folder(found) as rejected:       # locked, and leftovers of a killed process removed
        write_records(...)

Every check that can fail runs before anything is deleted. Files that a run does not write, such as a user's notes or a
launcher's log, are never deleted.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config.dump import shown
from surefoot.config.load import dump_config
from surefoot.config.resume_policy import Change
from surefoot.config.schema import RunConfig
from surefoot.families.files import PROCESSOR_FILES, TOKENIZER_FILES, read_json
from surefoot.planning.plan import RunPlan, plan_from_json, plan_to_json
from surefoot.report import html, profile, results
from surefoot.report.events import append_event, mend_events
from surefoot.report.log_copies import LOGS
from surefoot.report.trackers import adapters
from surefoot.runs import identity, rollback
from surefoot.runs.output_folder import Mode, changes_since, is_free, readable, refuse_occupied, require_free
from surefoot.runs.rollback import find_checkpoint
from surefoot.system import durable, folder_lock, hardware
from surefoot.system.errors import EnvironmentFault, Fault, IntegrityError
from surefoot.system.folders import AVERAGE, CONVERSION, CRITIC_FOLDER, MANIFEST, QUANTISED
from surefoot.system.folders import CONFIG as CONFIG
from surefoot.system.folders import PLAN as PLAN
from surefoot.training.checkpoint import TRAINER_STATE, Checkpoint, list_checkpoints, set_aside_newer
from surefoot.training.guard import Rollback
from surefoot.training.manifest import read_manifest

if TYPE_CHECKING:
    from surefoot.interop.translation import Translation

ENVIRONMENT = "environment.json"
DATA = "data.json"
ORIGIN = "training_args.json"  # the other tool's config that this config was translated from


@dataclass(frozen=True)
class FolderState:
    """What was found in the run folder.

    checkpoint: where to continue; None to start at step 0.
    rejected: newer checkpoints that failed verification.
    changes: config keys that differ and are allowed to.
    plan: the saved plan, or on other ranks the first rank's; None for a new run on the first rank.
    steps: steps of all checkpoints, intact or not.
    rollbacks: rollbacks that the run has made.
    """

    folder: Path
    mode: Mode
    checkpoint: Checkpoint | None = None
    rejected: tuple[Fault, ...] = ()
    changes: tuple[Change, ...] = ()
    plan: RunPlan | None = None
    steps: tuple[int, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()


def inspect_folder(config: RunConfig, mode: Mode) -> FolderState:
    """Inspect and check the folder. Nothing in it changes, but a save that a kill interrupted between its two renames.

    Raises InputError (2) for an occupied folder or a refused config change, EnvironmentFault (3) if the folder is not
    writable or another process uses it, IntegrityError (4) if there are checkpoints and none verifies.
    """
    folder, occupied = Path(config.output), require_free(config, mode)
    if not occupied or mode == "overwrite":
        return FolderState(folder, mode)
    found = _resume(config, folder)
    if mode == "new":  # a save that a kill interrupted may just have been completed
        refuse_occupied(folder, mode)
    return found


@contextmanager
def lock_folder(found: FolderState) -> Iterator[list[Path]]:
    """Lock the folder while the block runs, after removing an old run (overwrite) or the leftovers of a killed process.
    Yields the new paths of the rejected checkpoints. Raises EnvironmentFault or InputError if another process was
    faster. A symlink to a folder stays a symlink."""
    folder = found.folder
    with folder_lock.locked(folder.resolve()):
        if _steps(folder) != found.steps and found.mode == "resume":
            raise EnvironmentFault(
                Fault(
                    str(folder),
                    "another process has trained in it since this one started",
                    "start this one again",
                    code="SF-FOLDER-BUSY",
                )
            )
        if not is_free(folder):
            refuse_occupied(folder, found.mode)
        if found.mode == "overwrite":
            durable.empty_folder(folder, PLAN, written_by_run(folder))
        durable.clear_temporary(folder)
        yield set_aside_newer(folder, found.checkpoint.step) if found.checkpoint else []


def _steps(folder: Path) -> tuple[int, ...]:
    return tuple(checkpoint.step for checkpoint in list_checkpoints(folder))


def _resume(config: RunConfig, folder: Path) -> FolderState:
    with folder_lock.locked(folder):  # so that no other process is between its two renames
        durable.restore_replaced(folder)
    checkpoint, rejected, rollbacks = find_checkpoint(folder)
    if checkpoint is None:
        return FolderState(folder, "resume")
    changes = changes_since(config, folder)
    with readable(folder / PLAN):
        plan = plan_from_json(read_json(folder / PLAN).get("plan"))
    return FolderState(folder, "resume", checkpoint, tuple(rejected), tuple(changes), plan, _steps(folder), rollbacks)


# Includes what a killed process may have left without a manifest: sharded weights, and checkpoints set aside by a
# resumed run.
_PATTERN = re.compile(
    r"(\.rejected-)?checkpoint-\d+|failure-\d+(-.+)?|training_(loss|reward|eval_\w+)\.png|(adapter_|generation_)?config\.json"
    r"|(adapter_)?model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|(turns|teacher)-\d+\.jsonl"
)
_NAMES = {
    *(PLAN, CONFIG, MANIFEST, AVERAGE, CRITIC_FOLDER, TRAINER_STATE, "README.md"),
    *(ENVIRONMENT, DATA, ORIGIN, identity.RECORD, rollback.RECORD),
    *(results.TRAIN, results.EVAL, results.ALL, html.NAME, profile.FOLDER, adapters.FOLDER),
    *(CONVERSION, QUANTISED),
    *LOGS,
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
}


def written_by_run(run: Path) -> Callable[[str], bool]:
    """Return a predicate: whether a run writes this file or folder name, or a manifest in the folder lists it."""
    listed: set[str] = set()
    for place in (run, *(checkpoint.folder for checkpoint in list_checkpoints(run))):
        with suppress(IntegrityError):
            listed |= {Path(name).parts[0] for name in read_manifest(place)["files"]}
    return lambda name: name in _NAMES or name in listed or _PATTERN.fullmatch(name) is not None


def write_records(
    config: RunConfig,
    run: Path,
    plan: RunPlan,
    verified: Mapping[str, Any],
    data: Mapping[str, Any],
    origin: Translation | None = None,
    ranks: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write config.yaml (reproduces the run), plan.json (every choice and what was verified), environment.json (machine
    and ranks), data.json (the audit) and training_args.json (the other tool's config, if any; an existing one is kept
    without it).

    ranks: one entry per rank: its engine and the number of elements it stores.

    plan.json comes before the rest, because it marks a folder as a run. The manifest of an earlier result is removed.
    """
    durable.remove(run / MANIFEST)
    durable.write_json(run / PLAN, {"plan": plan_to_json(plan), "verified": verified})
    durable.write_text(run / CONFIG, dump_config(config))
    durable.write_json(run / ENVIRONMENT, hardware.describe() | ({"ranks": list(ranks)} if ranks else {}))
    durable.write_json(run / DATA, data)
    if origin is not None:
        from surefoot.interop.translation import to_json

        durable.write_json(run / ORIGIN, to_json(origin))


def sentence(change: Change) -> str:
    return f"{change.key} changed from {shown(change.old)} to {shown(change.new)}: {change.why}"


def note_changes(found: FolderState) -> None:
    """Log an event for each change with a warning. Call before config.yaml is rewritten, which erases the old value."""
    if not (warned := _warned(found)) or found.checkpoint is None:
        return
    mend_events(found.folder)
    for change in warned:
        append_event(found.folder, "changed", found.checkpoint.step, sentence(change))


def reminder(found: FolderState, *, command: bool) -> list[str]:
    """Lines printed right before the first step. command: whether the run was started from a command line."""
    if not command or not (warned := _warned(found)):
        return []
    return ["to keep the old settings, stop this run (Ctrl-C) and type:", f"  {_unchanged(found.folder, warned)}"]


def _warned(found: FolderState) -> list[Change]:
    return [change for change in found.changes if change.policy == "warned"]


def _unchanged(run: Path, warned: Sequence[Change]) -> str:
    old = [f"{change.key}={shown(change.old)}" for change in warned]
    return shlex.join(["surefoot", "train", str(run / CONFIG), *old, "--resume"])
