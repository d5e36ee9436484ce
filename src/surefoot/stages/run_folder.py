"""Who owns the run folder: start, resume or replace. Every check that can fail runs before anything is deleted."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surefoot.config.load import plain_config
from surefoot.config.resume_policy import Change, diff_configs
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import read_yaml
from surefoot.errors import EnvironmentFault, Fault, InputError
from surefoot.families.files import read_json
from surefoot.planning.plan import RunPlan
from surefoot.planning.serial import plan_from_json
from surefoot.training.checkpoint import Checkpoint, clear_leftovers, newest_verified, read_manifest, set_aside_newer

Mode = Literal["new", "resume", "overwrite"]
CONFIG = "config.yaml"
PLAN = "plan.json"


@dataclass(frozen=True)
class Claim:
    """What was found in the run folder. checkpoint: where to continue, None to start at step 0.

    rejected: newer checkpoints that did not verify. changes: config keys that differ and may.
    plan: the saved plan, None where there is none or where a changed key needs a new one.
    """

    folder: Path
    mode: Mode
    checkpoint: Checkpoint | None = None
    rejected: tuple[Fault, ...] = ()
    changes: tuple[Change, ...] = ()
    plan: RunPlan | None = None


def claim(config: RunConfig, mode: Mode) -> Claim:
    """Look, check, delete nothing. Raises InputError (2) on an occupied folder or a refused change of the config,
    IntegrityError (4) when there are checkpoints and none verifies."""
    folder = Path(config.output)
    if folder.exists() and not folder.is_dir():
        raise InputError(Fault("output", f"{folder} is a file", "name a folder"))
    occupied = folder.is_dir() and any(folder.iterdir())
    if mode == "new" and occupied:
        raise InputError(
            Fault("output", f"{folder} is not empty", "continue it with --resume, replace it with --overwrite")
        )
    if mode == "overwrite" and occupied and not _is_run_folder(folder):
        raise InputError(
            Fault("output", f"{folder} holds files but no surefoot run, so it is not deleted", "name another folder")
        )
    return _resume(config, folder) if mode == "resume" and occupied else Claim(folder, mode)


def occupy(claim: Claim) -> list[Path]:
    """Make the folder ready: replace an old run, or clear what a killed process left in its own.

    Returns where the rejected checkpoints are now."""
    folder = claim.folder
    try:
        if claim.mode == "overwrite" and folder.is_dir():
            trash = folder.with_name(f".trash-{folder.name}")
            if trash.exists():
                shutil.rmtree(trash)
            folder.rename(trash)
            shutil.rmtree(trash)
        folder.mkdir(parents=True, exist_ok=True)
        clear_leftovers(folder)
        return set_aside_newer(folder, claim.checkpoint.step) if claim.checkpoint else []
    except OSError as error:
        fault = Fault(str(folder), f"cannot be prepared ({error.strerror})", "check its permissions")
        raise EnvironmentFault(fault) from error


def _is_run_folder(folder: Path) -> bool:
    return (folder / CONFIG).is_file() or (folder / PLAN).is_file()


def _resume(config: RunConfig, folder: Path) -> Claim:
    if not _is_run_folder(folder):
        what = f"{folder} holds files but no surefoot run"
        raise InputError(Fault("output", what, "check the path, or leave out --resume"))
    checkpoint, rejected = newest_verified(folder)
    if checkpoint is None:
        return Claim(folder, "resume")
    changes = diff_configs(_saved_config(folder), plain_config(config))
    refused = [change for change in changes if change.policy == "refused"]
    if refused:
        raise InputError([_refusal(change, folder) for change in refused])
    plan = None
    if (folder / PLAN).is_file():
        plan = plan_from_json(read_json(folder / PLAN).get("plan"))
    return Claim(folder, "resume", checkpoint, tuple(rejected), tuple(changes), plan)


def _refusal(change: Change, folder: Path) -> Fault:
    what = f"was {change.old!r} in {folder}, is {change.new!r} now: {change.why}"
    return Fault(change.key, what, "change it back, or start another run")


def _saved_config(folder: Path) -> dict[str, Any]:
    try:
        return read_yaml(folder / CONFIG).data
    except InputError as error:
        first = error.faults[0]
        raise InputError(Fault(first.where, first.what, "restore it to resume this run")) from None


def saved_identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """Hashes and versions under which a checkpoint was written."""
    return read_manifest(checkpoint.folder)["identity"]
