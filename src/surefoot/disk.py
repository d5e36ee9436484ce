"""The operations that change a disk, one function each. `durable` is made of them, and nothing else calls them.

They are as thin as the system's own calls so that a test can put its own in their place: to record them, to refuse
the n-th one, to take only a part of what is written, or to end there as a kill would. Nothing here knows of that.
"""

from __future__ import annotations

import os
import shutil
from io import FileIO
from pathlib import Path


def create(path: Path) -> FileIO:
    """A new file, open for writing. OSError where there is one."""
    return open(path, "xb", buffering=0)


def open_end(path: Path) -> FileIO:
    """A file, made if missing, open for writing at its end."""
    return open(path, "ab", buffering=0)


def write(file: FileIO, data: memoryview) -> int:
    """How many bytes were taken; fewer than there are where the disk is about to be full."""
    return file.write(data)


def truncate(file: FileIO, size: int) -> None:
    file.truncate(size)


def sync_file(file: FileIO) -> None:
    """Return when its content is on the disk."""
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Return when a file's content, or a folder's names, are on the disk. Windows cannot open folders; it flushes
    renames by itself."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def chmod(path: Path, mode: int) -> None:
    path.chmod(mode)


def rename(source: Path, target: Path) -> None:
    """A folder that has something in it is not replaced."""
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def unlink(path: Path) -> None:
    path.unlink()


def make_folder(path: Path, parents: bool = False) -> None:
    path.mkdir(parents=parents)


def remove_folder(path: Path) -> None:
    """An empty one."""
    path.rmdir()


def remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """A folder and all that is in it, one after another. ignore_errors: what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=ignore_errors)
