"""Whether a folder is one that surefoot made: a run, a checkpoint, an export, a failure; and the files that tell.

Needs no torch, so that a wrong folder is answered at once: commands ask before they import anything heavy, and what
reads the folder asks again, for callers from Python.
"""

from __future__ import annotations

import re
from pathlib import Path

from surefoot.system.errors import Fault, InputError

PLAN, CONFIG = "plan.json", "config.yaml"  # of a run; the plan is written first
MANIFEST = "MANIFEST.json"
CERTIFICATE = "export.json"
FAILURE, FAILED_BATCH = "failure.json", "batch.safetensors"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
AVERAGE = "ema"  # in a run or a checkpoint of stage ppo: the moving average of the policy
CRITIC_FOLDER = "critic"  # there as well


def require_run(folder: Path) -> None:
    """Raises InputError for a folder that is no run."""
    for name in (PLAN, CONFIG):
        if not (folder / name).is_file():
            raise InputError(
                Fault(
                    str(folder), f"is no run folder: it has no {name}", "name the output of a run", code="SF-USE-FOLDER"
                )
            )


def require_written(folder: Path) -> None:
    """Raises InputError for a folder without anything that could be verified."""
    told = any((folder / name).is_file() for name in (CERTIFICATE, MANIFEST)) or is_checkpoint(folder)
    if not told and not any(CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir()):
        if is_run(folder):
            what = "is a run that has no checkpoint yet, so there is nothing to verify"
            raise InputError(
                Fault(
                    str(folder),
                    what,
                    "where it died, the same command with --resume starts at step 0",
                    code="SF-USE-FOLDER",
                )
            )
        what = "is neither a run folder nor a checkpoint nor an export"
        raise InputError(Fault(str(folder), what, "name one that surefoot wrote", code="SF-USE-FOLDER"))


def is_checkpoint(folder: Path) -> bool:
    """By its name."""
    return folder.name.startswith("checkpoint-")


def is_run(folder: Path) -> bool:
    """A failure-STEP, which has plan and config as well, is none."""
    failure = any((folder / name).is_file() for name in (FAILURE, FAILED_BATCH))
    return not failure and all((folder / name).is_file() for name in (PLAN, CONFIG))


def run_of(folder: Path) -> Path | None:
    """The run that wrote this folder: itself, or the one in which it lies as a checkpoint or as an average. None where
    surefoot did not write it, or where it was taken out of its run."""
    for place in (folder, *folder.resolve().parents):
        if (place / PLAN).is_file():
            return place
        if not is_checkpoint(place.resolve()) and place.resolve().name != AVERAGE:
            break
    return None


def require_failure(folder: Path) -> None:
    """Raises InputError for a folder that records no failure."""
    if not folder.is_dir():
        raise InputError(
            Fault(
                str(folder), "is no folder", "a failure lies in the run folder, as failure-STEP", code="SF-USE-FOLDER"
            )
        )
    if not (folder / FAILURE).is_file() and not (folder / FAILED_BATCH).is_file():
        what = f"records no failure: it has no {FAILURE}"
        raise InputError(Fault(str(folder), what, "give the folder failure-STEP of a run", code="SF-USE-FOLDER"))
