"""List the runs in a folder, with a row of the overview for each.

A run is identified by a hash of its folder's name; requests are looked up in the list and never used as a path.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.report.events import EVENTS, SAMPLES
from surefoot.report.html import MANIFEST
from surefoot.report.journal import Record, parse
from surefoot.report.record import is_plain, results_of, sound_events, sound_rows
from surefoot.report.results import ALL
from surefoot.report.status import WORDS, Status, progress, status_of
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.views import figures, guarded
from surefoot.system import folder_lock


def last_records(path: Path, most: int = 1 << 16) -> list[Record]:
    """The records in the last `most` bytes of a file that may be long."""
    if not is_plain(path):
        return []
    with path.open("rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        lines = file.read(most).decode("utf-8", errors="replace").split("\n")
    records = (parse(line) for line in (lines[1:] if start else lines))
    return [record for record in records if record is not None]


_DEPTH = 3  # levels below the named folder where runs are searched, as runs/sweep/lr-1e-4 in a project
_ORDER: tuple[Status, ...] = ("running", "diverged", "failed", "stopped", "finished")


@dataclass(frozen=True)
class Run:
    """A run of the list. name: its folder, relative to the one that the board shows."""

    id: str
    name: str
    folder: Path


@dataclass(frozen=True)
class Glance:
    """One row of the overview, with the numbers of the run's report as text. changed: time of the last log entry, in
    seconds since the epoch."""

    id: str
    name: str
    status: Status
    word: str
    done: int
    total: int
    loss: str
    evaluation: str
    speed: str
    left: str
    changed: float


def list_runs(root: Path) -> list[Run]:
    """The run folders in `root` and its subfolders, or `root` itself if it is one. Skips links, hidden folders and
    subfolders of runs."""
    if is_run(root):
        return [_run(root, Path(os.path.abspath(root)).name)]
    return [_run(folder, folder.relative_to(root).as_posix()) for folder in _below(root, _DEPTH)]


def _below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            found = sorted(Path(entry.path) for entry in entries if _is_candidate(entry))
    except OSError:
        return
    for one in found:
        if is_run(one):
            yield one
        elif depth > 1:
            yield from _below(one, depth - 1)


def is_run(folder: Path) -> bool:
    return is_plain(folder / "plan.json")


def status_now(folder: Path, events: Sequence[dict[str, object]]) -> Status:
    return status_of(events, locked=folder_lock.is_in_use(folder), published=is_plain(folder / MANIFEST))


@dataclass
class Overview:
    """Cached view of all runs; reads only what changed."""

    root: Path
    _known: dict[str, tuple[object, Glance]] = field(default_factory=dict)

    def glances(self) -> list[Glance]:
        """Rows of all runs: running ones first, then by the time of the last entry."""
        found = [self._glance(run) for run in list_runs(self.root)]
        return sorted(found, key=lambda glance: (_ORDER.index(glance.status) > 0, -glance.changed, glance.name))

    def _glance(self, run: Run) -> Glance:
        now, known = signature(run.folder), self._known.get(run.id)
        if known is None or known[0] != now:
            known = self._known[run.id] = (now, _look(run))
        return known[1]


def _look(run: Run) -> Glance:
    """The training loss is the newest logged one for all runs, so that running and ended ones compare; a finished run's
    report shows the mean over the run."""
    rows = sound_rows(last_records(run.folder / LOG))
    status = status_now(run.folder, sound_events(last_records(run.folder / EVENTS)))
    done, total = progress(rows)
    left = rows[-1].get("remaining_time") if rows and status == "running" else None
    results = results_of(run.folder)
    without_mean = {key: value for key, value in results.items() if key != "train_loss"}
    found = guarded("the row of figures", lambda: figures(rows, status, without_mean), [], [])
    shown = {one.name: one.value for one in found}
    changed = _file_state(run.folder / LOG) or _file_state(run.folder / "plan.json")
    return Glance(
        id=run.id,
        name=run.name,
        status=status,
        word=WORDS[status],
        done=done,
        total=total,
        loss=f"reward {shown['reward']}" if "reward" in shown else shown.get("training loss", ""),
        evaluation=shown.get("evaluation loss", "") or shown.get("evaluation reward", ""),
        speed=shown.get("tokens per second", ""),
        left=left if isinstance(left, str) else "",
        changed=changed[2] if changed else 0.0,
    )


def _run(folder: Path, name: str) -> Run:
    return Run(hashlib.sha256(os.fsencode(name)).hexdigest()[:12], name, folder)


def _is_candidate(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def signature(run: Path) -> tuple[object, ...]:
    """A value that changes whenever anything on the run's live page changes: files, or whether a process is running."""
    return (
        *(_file_state(run / name) for name in (LOG, EVENTS, SAMPLES, ALL, MANIFEST)),
        folder_lock.is_in_use(run),
    )


def _file_state(path: Path) -> tuple[int, int, float] | None:
    """Inode, size and time of a regular file."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else None
