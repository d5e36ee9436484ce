"""The findings of `surefoot verify` as tables, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from surefoot.report.verification import FolderCheck
from surefoot.system.messages import counted
from surefoot.training.compare import Difference


def files_table(checks: Sequence[FolderCheck]) -> Table:
    """One row per file that is not as written: folder, name, bytes, the head of its SHA-256, verdict. A run has many
    files, and those that are well are counted in a line of their own; the JSON has all."""
    table = Table(box=None, pad_edge=False)
    for heading in ("folder", "file"):
        table.add_column(heading)
    table.add_column("bytes", justify="right")
    table.add_column("sha256")
    table.add_column("verdict")
    for check in checks:
        if check.fault:
            table.add_row(check.name, "", "", "", check.fault.what, style="bold red")
        for file in check.files:
            if file.fault:
                size, digest = f"{file.size:,}", file.sha256[:12]
                table.add_row(check.name, file.name, size, digest, file.fault.what, style="bold red")
    return table


def counts_line(checks: Sequence[FolderCheck]) -> str:
    """How many files are as they were written, of how many, and how far the logs were looked at."""
    files = [file for check in checks for file in check.files]
    well = sum(file.fault is None for file in files)
    of = f"{well}" if well == len(files) else f"{well} of {len(files)}"
    as_of = [check.logs for check in checks if check.logs]
    logs = f", the logs as far as {' and '.join(as_of)}" if as_of else ""
    folders = counted(len(checks) - len(as_of), "folder")
    return f"{of} files in {folders} are as written{logs}"


MOST_SHOWN = 10  # differences listed one by one; two unlike runs differ in every tensor


def differences_table(differences: Sequence[Difference]) -> Table:
    """The first differences one by one, the others counted; no rows when there is none."""
    table = Table(box=None, pad_edge=False, show_header=bool(differences))
    table.add_column("where")
    table.add_column("difference")
    for difference in differences[:MOST_SHOWN]:
        table.add_row(difference.where, difference.what)
    if rest := Counter(difference.where.partition(":")[0] for difference in differences[MOST_SHOWN:]):
        table.add_row("and more", ", ".join(f"{count} in {file}" for file, count in rest.items()))
    return table


def verdict(checks: Sequence[FolderCheck], differences: Sequence[Difference] | None) -> dict[str, Any]:
    """JSON-able; `differences` is null when nothing was compared."""
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
