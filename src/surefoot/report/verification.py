"""What `surefoot verify` finds: files against their manifests, and one run against another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import Fault, InputError, IntegrityError
from surefoot.report.rows import without_timing
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import read_rows
from surefoot.training.checkpoint import MANIFEST, FileCheck, check_files, list_checkpoints, newest_verified
from surefoot.training.compare import Difference, compare_checkpoints


@dataclass(frozen=True)
class FolderCheck:
    """One folder with a manifest, or with what should have been one (`fault`)."""

    name: str
    files: tuple[FileCheck, ...]
    fault: Fault | None = None

    @property
    def faults(self) -> list[Fault]:
        return [self.fault] if self.fault else [check.fault for check in self.files if check.fault]


def verify_folder(folder: Path) -> list[FolderCheck]:
    """A checkpoint, or a run folder: its published files and each of its checkpoints, oldest first."""
    checkpoints = sorted(list_checkpoints(folder), key=lambda checkpoint: checkpoint.step)
    folders = [checkpoint.folder for checkpoint in checkpoints]
    if (folder / MANIFEST).is_file() or folder.name.startswith("checkpoint-"):
        folders.append(folder)
    if not folders:
        raise InputError(Fault(str(folder), "is neither a run folder nor a checkpoint", "name one that surefoot wrote"))
    return [_check(folder, path) for path in folders]


def compare_folders(a: Path, b: Path) -> list[Difference]:
    """Bit comparison of two runs (their newest checkpoints, and their logs without times) or of two checkpoints."""
    first, second = _checkpoint(a), _checkpoint(b)
    differences = compare_checkpoints(first, second)
    if first != a and second != b:
        differences += _compare_logs(a / LOG, b / LOG)
    return differences


def _check(root: Path, folder: Path) -> FolderCheck:
    name = folder.relative_to(root).as_posix()
    name = folder.name if name == "." else name
    try:
        return FolderCheck(name, tuple(check_files(folder)))
    except IntegrityError as error:
        return FolderCheck(name, (), error.faults[0])


def _checkpoint(folder: Path) -> Path:
    if not list_checkpoints(folder):
        if (folder / MANIFEST).is_file():
            return folder
        raise InputError(Fault(str(folder), "has no checkpoint to compare", "name a run folder or a checkpoint"))
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
