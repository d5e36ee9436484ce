"""What `surefoot verify` finds: files against their manifests, and one run against another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.report.log_copies import check_logs, has_copies
from surefoot.report.rows import without_timing
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import read_rows
from surefoot.system import plain_files
from surefoot.system.errors import Fault, InputError, IntegrityError
from surefoot.system.folders import CERTIFICATE, MANIFEST, is_checkpoint, require_written
from surefoot.training.checkpoint import TRAINER_STATE, check_checkpoint, list_checkpoints, newest_verified
from surefoot.training.compare import Difference, compare_checkpoints, compare_weights
from surefoot.training.manifest import FileCheck, check_against, check_files


@dataclass(frozen=True)
class FolderCheck:
    """One folder with a manifest, or with what should have been one (`fault`). logs: of a run, the checkpoint whose
    copies its logs were held against; None where there is none, as of an earlier version."""

    name: str
    files: tuple[FileCheck, ...]
    fault: Fault | None = None
    logs: str | None = None

    @property
    def faults(self) -> list[Fault]:
        return [self.fault] if self.fault else [check.fault for check in self.files if check.fault]


def verify_folder(folder: Path) -> list[FolderCheck]:
    """A checkpoint, an export, or a run folder: its published files and each of its checkpoints, oldest first."""
    require_written(folder)
    checkpoints = sorted(list_checkpoints(folder), key=lambda checkpoint: checkpoint.step)
    manifest = (folder / MANIFEST).is_file()
    if (folder / CERTIFICATE).is_file() and not (manifest or checkpoints):  # a run that merges has one as well
        return [_check_export(folder)]
    folders = [checkpoint.folder for checkpoint in checkpoints]
    checks = [_check(folder, path) for path in folders]
    sound = [path for path, check in zip(folders, checks, strict=True) if not check.faults]
    if manifest or is_checkpoint(folder) or is_finished(folder):
        checks.append(_check(folder, folder))
    logs = _check_logs(folder, sound)
    return [*checks, logs] if logs else checks


def _check_logs(run: Path, checkpoints: Sequence[Path]) -> FolderCheck | None:
    """The logs of a run against the newest of its sound checkpoints that has copies. checkpoints: oldest first."""
    for checkpoint in reversed(checkpoints):
        if has_copies(checkpoint):
            try:
                return FolderCheck("logs", tuple(check_logs(run, checkpoint)), logs=checkpoint.name)
            except IntegrityError as error:
                return FolderCheck("logs", (), error.faults[0], logs=checkpoint.name)
    return None


def is_finished(run: Path) -> bool:
    """Whether the run's outcome stands in its folder: what was published belongs to the newest checkpoint."""
    newest = next(iter(list_checkpoints(run)), None)
    path = run / TRAINER_STATE
    if newest is None or not path.is_file():
        return False
    try:
        return json.loads(plain_files.read_text(path))["global_step"] == newest.step
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True


def compare_folders(a: Path, b: Path) -> list[Difference]:
    """Bit comparison of two checkpoints, or of two runs: published weights, newest checkpoints, logs without times."""
    first, second = _checkpoint(a), _checkpoint(b)
    if first == a or second == b:
        return compare_checkpoints(first, second)
    return compare_weights(a, b) + compare_checkpoints(first, second) + _compare_logs(a / LOG, b / LOG)


def _check(root: Path, folder: Path) -> FolderCheck:
    name = folder.relative_to(root).as_posix()
    name = folder.name if name == "." else name
    try:
        check = check_checkpoint if is_checkpoint(folder) else check_files
        return FolderCheck(name, tuple(check(folder)))
    except IntegrityError as error:
        return FolderCheck(name, (), error.faults[0])


def _check_export(folder: Path) -> FolderCheck:
    """The files that an export's certificate names."""
    try:
        files = json.loads(plain_files.read_text(folder / CERTIFICATE))["outputs"]
        return FolderCheck(folder.name, tuple(check_against(folder, files)))
    except IntegrityError as error:
        reason = error.faults[0].what
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    what = f"cannot be used as a certificate: {reason}"
    return FolderCheck(
        folder.name, (), Fault(str(folder / CERTIFICATE), what, "export again", code="SF-CHECKPOINT-DAMAGED")
    )


def _checkpoint(folder: Path) -> Path:
    if not list_checkpoints(folder):
        if (folder / MANIFEST).is_file():
            return folder
        raise InputError(
            Fault(
                str(folder),
                "has no checkpoint to compare",
                "name a run folder or a checkpoint",
                code="SF-CHECKPOINT-DAMAGED",
            )
        )
    newest, _ = newest_verified(folder)
    assert newest is not None  # there are checkpoints, and none valid would have raised
    return newest.folder


def _compare_logs(a: Path, b: Path) -> list[Difference]:
    first, second = ([without_timing(row) for row in read_rows(path)] for path in (a, b))
    if len(first) != len(second):
        return [Difference(LOG, f"{len(first)} rows against {len(second)}")]
    for one, other in zip(first, second, strict=True):
        if one != other:
            keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
            what = ", ".join(f"{key} {one.get(key)} against {other.get(key)}" for key in keys)
            return [Difference(f"{LOG}: step {one['current_steps']}", f"first row that differs: {what}")]
    return []
