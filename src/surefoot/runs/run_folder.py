"""Who owns the run folder: start, resume or replace. Every check that can fail runs before anything is deleted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config.dump import shown
from surefoot.config.load import plain_config
from surefoot.config.resume_policy import Change, diff_configs
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import read_yaml
from surefoot.families.files import read_json
from surefoot.planning.plan import RunPlan
from surefoot.planning.serial import plan_from_json
from surefoot.runs.occupied import Mode, is_free, refuse_occupied, require_free
from surefoot.runs.rollback_record import find_checkpoint
from surefoot.runs.run_names import written_by_run
from surefoot.system import durable, folder_lock
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.made_folders import CONFIG as CONFIG
from surefoot.system.made_folders import PLAN as PLAN
from surefoot.training.checkpoint import Checkpoint, list_checkpoints, set_aside_newer
from surefoot.training.manifest import read_manifest
from surefoot.training.rollback import Rollback


@dataclass(frozen=True)
class Claim:
    """What was found in the run folder. checkpoint: where to continue, None to start at step 0.

    rejected: newer checkpoints that did not verify. changes: config keys that differ and may.
    plan: the saved plan, None where there is no checkpoint. steps: of all checkpoints, good or not. rollbacks: those
    that the run has made.
    """

    folder: Path
    mode: Mode
    checkpoint: Checkpoint | None = None
    rejected: tuple[Fault, ...] = ()
    changes: tuple[Change, ...] = ()
    plan: RunPlan | None = None
    steps: tuple[int, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()


def claim(config: RunConfig, mode: Mode) -> Claim:
    """Look and check; nothing is lost. Raises InputError (2) on an occupied folder or a refused change of the config,
    EnvironmentFault (3) where nothing can be written or another process is at work, IntegrityError (4) when there are
    checkpoints and none verifies."""
    folder, occupied = Path(config.output), require_free(config, mode)
    return _resume(config, folder) if mode == "resume" and occupied else Claim(folder, mode)


@contextmanager
def occupy(claim: Claim) -> Iterator[list[Path]]:
    """Have the folder to oneself while the block runs, made ready: an old run replaced, or cleared of what a killed
    process left. Yields where the rejected checkpoints are now. Raises EnvironmentFault or InputError where another
    process was faster. A link to a folder stays a link."""
    folder = claim.folder
    with folder_lock.locked(folder.resolve()):
        if _steps(folder) != claim.steps and claim.mode == "resume":
            raise EnvironmentFault(
                Fault(
                    str(folder),
                    "another process trained in it meanwhile",
                    "start this one again",
                    code="SF-RESUME-CHANGED",
                )
            )
        if not is_free(folder):
            refuse_occupied(folder, claim.mode)
        if claim.mode == "overwrite":
            durable.empty_folder(folder, PLAN, written_by_run(folder))
        durable.clear_temporary(folder)
        yield set_aside_newer(folder, claim.checkpoint.step) if claim.checkpoint else []


def _steps(folder: Path) -> tuple[int, ...]:
    return tuple(checkpoint.step for checkpoint in list_checkpoints(folder))


def _resume(config: RunConfig, folder: Path) -> Claim:
    with folder_lock.locked(folder):  # else it could be another process's, at work between two renames
        durable.restore_replaced(folder)
    checkpoint, rejected, rollbacks = find_checkpoint(folder)
    if checkpoint is None:
        return Claim(folder, "resume")
    with _to_be_restored(folder / CONFIG):
        saved = with_defaults(read_yaml(folder / CONFIG).data)
    changes = diff_configs(saved, plain_config(config))
    refused = [change for change in changes if change.policy == "refused"]
    if refused:
        raise InputError([_refusal(change, folder) for change in refused])
    with _to_be_restored(folder / PLAN):
        plan = plan_from_json(read_json(folder / PLAN).get("plan"))
    return Claim(folder, "resume", checkpoint, tuple(rejected), tuple(changes), plan, _steps(folder), rollbacks)


def with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """A config saved before a key existed ran with that key's default. One that is no longer valid stays as it is."""
    try:
        return plain_config(RunConfig.model_validate(saved))
    except ValueError:
        return saved


def _refusal(change: Change, folder: Path) -> Fault:
    what = f"was {shown(change.old)} in {folder}, is {shown(change.new)} now: {change.why}"
    return Fault(change.key, what, "change it back, or start another run", code="SF-RESUME-CHANGED")


@contextmanager
def _to_be_restored(path: Path) -> Iterator[None]:
    """A record that cannot be read is one fault, which names the file."""
    try:
        yield
    except InputError as error:
        first = error.faults[0]
        where = first.where if first.where.startswith(str(path)) else f"{path}: {first.where}"
        raise InputError(Fault(where, first.what, "restore it to resume this run", first.code)) from None


def saved_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Hashes and versions under which a checkpoint was written."""
    return read_manifest(checkpoint.folder)["identity"]
