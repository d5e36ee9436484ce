"""Surefoot with one of its protections taken out, to show that the harness notices.

    pytest tests/faults --break fsync     all of the harness over a broken build: it must go red

`test_breaks.py` does the same with a few trials each, so that it is known of every build.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from surefoot.system import disk, durable, folder_lock
from surefoot.training import checkpoint, manifest, step

BREAKS = {
    "fsync": "nothing is flushed to the disk",
    "hash": "of a checkpoint's files only the sizes are looked at",
    "lock": "a folder in use keeps nobody out",
    "guard": "a step is taken whatever its loss and gradients are",
    "parents": "the names of folders that are made for a run are not flushed",
    "order": "a new name is given first, and what stands under it flushed afterwards",
}


@contextmanager
def broken(name: str | None) -> Iterator[None]:
    """Within a recording of the disk, where there is one, so that it sees what is left out. None breaks nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "fsync":
            patch.setattr(disk, "sync", lambda path: None)
            patch.setattr(disk, "sync_file", lambda file: None)
        elif name == "hash":
            for module in (manifest, checkpoint):
                patch.setattr(module, "check_against", partial(manifest.check_against, hashed_up_to=0))
        elif name == "lock":
            patch.setattr(folder_lock, "_flock", lambda handle, path: None)
        elif name == "guard":
            patch.setattr(step, "judge", lambda *arguments, **named: ("stepped", None))
        elif name == "parents":
            patch.setattr(durable, "make_folders", lambda path: Path(path).mkdir(parents=True, exist_ok=True))
        elif name == "order":
            _flush_late(patch)
        yield


def _flush_late(patch: pytest.MonkeyPatch) -> None:
    waiting: list[Path] = []
    sync = disk.sync

    def later(path: Path) -> None:
        waiting.append(Path(path))

    def after(move: Any) -> Any:
        def call(source: Path, target: Path) -> None:
            move(source, target)
            for path in waiting:
                below = path == Path(source) or Path(source) in path.parents
                moved = Path(target) / path.relative_to(source) if below else path
                if moved.exists():
                    sync(moved)
            waiting.clear()

        return call

    patch.setattr(disk, "sync", later)
    patch.setattr(disk, "sync_file", lambda file: later(Path(file.name)))
    patch.setattr(disk, "rename", after(disk.rename))
    patch.setattr(disk, "replace", after(disk.replace))
