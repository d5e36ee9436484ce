"""Output of `surefoot verify`: files against their manifests, and one run against another; as lines and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from surefoot.report.log_copies import check_logs, has_copies
from surefoot.report.log_marks import check_marks
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import read_rows, without_timing
from surefoot.system import plain_files
from surefoot.system.errors import Fault, InputError, IntegrityError
from surefoot.system.folders import CERTIFICATE, MANIFEST, is_checkpoint, require_written
from surefoot.system.messages import counted
from surefoot.training.checkpoint import TRAINER_STATE, check_checkpoint, list_checkpoints, newest_verified
from surefoot.training.compare import Difference, compare_checkpoints, compare_weights
from surefoot.training.manifest import FileCheck, check_against, check_files


@dataclass(frozen=True)
class FolderCheck:
    """The check of one folder with a manifest, or with what should have been one (`fault`).

    logs: for a run, the checkpoint whose copies its logs were compared with; None if there is none, as in earlier
        versions.
    """

    name: str
    files: tuple[FileCheck, ...]
    fault: Fault | None = None
    logs: str | None = None

    @property
    def faults(self) -> list[Fault]:
        return [self.fault] if self.fault else [check.fault for check in self.files if check.fault]


def verify_folder(folder: Path) -> list[FolderCheck]:
    """Check a checkpoint, an export, or a run folder: its published files and each checkpoint, oldest first."""
    require_written(folder)
    checkpoints = sorted(list_checkpoints(folder), key=lambda checkpoint: checkpoint.step)
    manifest = (folder / MANIFEST).is_file()
    if (folder / CERTIFICATE).is_file() and not (
        manifest or checkpoints
    ):  # a run that publishes merged weights has one as well
        return [_check_export(folder)]
    folders = [checkpoint.folder for checkpoint in checkpoints]
    checks = [_check(folder, path) for path in folders]
    sound = [path for path, check in zip(folders, checks, strict=True) if not check.faults]
    if manifest or is_checkpoint(folder) or is_finished(folder):
        checks.append(_check(folder, folder))
    logs = _check_logs(folder, sound)
    return [*checks, logs] if logs else checks


def _check_logs(run: Path, checkpoints: Sequence[Path]) -> FolderCheck | None:
    """Compare a run's logs with the newest intact checkpoint that has copies, and marks. checkpoints: oldest first."""
    # The newest copies cover the most rows; those of a damaged checkpoint prove nothing.
    for checkpoint in reversed(checkpoints):
        if has_copies(checkpoint):
            try:
                checks = (*check_logs(run, checkpoint), *check_marks(run, checkpoint))
                return FolderCheck("logs", checks, logs=checkpoint.name)
            except IntegrityError as error:
                return FolderCheck("logs", (), error.faults[0], logs=checkpoint.name)
    return None


def is_finished(run: Path) -> bool:
    """Whether the published files of a run belong to its newest checkpoint."""
    newest = next(iter(list_checkpoints(run)), None)
    path = run / TRAINER_STATE
    if newest is None or not path.is_file():
        return False
    try:
        return json.loads(plain_files.read_text(path))["global_step"] == newest.step
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return True  # damaged: treated as finished, so that its manifest names the file


def compare_folders(a: Path, b: Path) -> list[Difference]:
    """Compare two checkpoints or runs bit for bit: published weights, newest checkpoints, logs without times."""
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
    """Check the files that an export's certificate names."""
    try:
        files = json.loads(plain_files.read_text(folder / CERTIFICATE))["outputs"]
        return FolderCheck(folder.name, tuple(check_against(folder, files)))
    except IntegrityError as error:
        reason = error.faults[0].what
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"
    what = f"is not a readable certificate: {reason}"
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
                code="SF-CHECKPOINT-NONE",
            )
        )
    newest, _ = newest_verified(folder)
    assert newest is not None  # there are checkpoints, and none valid would have raised
    return newest.folder


def _compare_logs(a: Path, b: Path) -> list[Difference]:
    first, second = ([without_timing(row) for row in read_rows(path)] for path in (a, b))
    if len(first) != len(second):
        return [Difference(LOG, f"{len(first)} and {len(second)}")]
    for one, other in zip(first, second, strict=True):
        if one != other:
            keys = sorted(key for key in {*one, *other} if one.get(key) != other.get(key))
            what = ", ".join(f"{key} {one.get(key)} and {other.get(key)}" for key in keys)
            return [Difference(f"{LOG}: step {one['current_steps']}", f"first row that differs: {what}")]
    return []


def counts_line(checks: Sequence[FolderCheck]) -> str:
    """How many files are intact, and up to which checkpoint the logs were checked. The others are faults, one line
    each."""
    files = [file for check in checks for file in check.files]
    well = sum(file.fault is None for file in files)
    of = f"{well}" if well == len(files) else f"{well} of {len(files)}"
    as_of = [check.logs for check in checks if check.logs]
    logs = f"; the logs are as written up to {' and '.join(as_of)}" if as_of else ""
    folders = counted(len(checks) - len(as_of), "folder")
    return f"{of} files in {folders} are as written{logs}"


MOST_SHOWN = 10  # differences listed one by one; two unlike runs differ in every tensor


def differences_table(differences: Sequence[Difference]) -> Table:
    """The first differences one by one and the number of others; no rows if there are none."""
    table = Table(box=None, pad_edge=False, show_header=bool(differences))
    table.add_column("where")
    table.add_column("difference")
    for difference in differences[:MOST_SHOWN]:
        table.add_row(difference.where, difference.what)
    if rest := Counter(difference.where.partition(":")[0] for difference in differences[MOST_SHOWN:]):
        table.add_row("and more", ", ".join(f"{count} in {file}" for file, count in rest.items()))
    return table


def verdict(checks: Sequence[FolderCheck], differences: Sequence[Difference] | None) -> dict[str, Any]:
    """The result as JSON values; `differences` is null if nothing was compared."""
    return {
        "ok": not any(check.faults for check in checks) and not differences,
        "folders": [
            {
                "folder": check.name,
                "fault": str(check.fault) if check.fault else None,
                "logs_as_of": check.logs,
                "files": [
                    {
                        "file": file.name,
                        "bytes": file.size,
                        "sha256": file.sha256,
                        "fault": file.fault.what if file.fault else None,
                    }
                    for file in check.files
                ],
            }
            for check in checks
        ],
        "differences": None
        if differences is None
        else [{"where": difference.where, "what": difference.what} for difference in differences],
    }
