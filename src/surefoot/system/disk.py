"""The operations that change a disk, one function each. `durable` is made of them, and nothing else calls them.

They are as thin as the system's own calls so that a test can put its own in their place: to record them, to refuse
the n-th one, to take only a part of what is written, or to end there as a kill would. Nothing here knows of that.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from io import FileIO
from pathlib import Path

# What is not a file is told without waiting for a FIFO's other end; Windows knows neither.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def create(path: Path) -> FileIO:
    """A new file, open for writing. OSError where there is one."""
    return open(path, "xb", buffering=0)


def open_end(path: Path) -> FileIO:
    """A file, made if missing, open for writing at its end. OSError for a link and for what is no file."""
    return open(path, "ab", buffering=0, opener=open_itself)


def open_itself(path: str | Path, flags: int) -> int:
    """The handle of a file under its own name: OSError for a link, behind which another's file could lie, and for a
    FIFO or a device. flags: of `os.open`. Children do not inherit it."""
    name = os.path.basename(path)
    try:
        handle = os.open(path, flags | _NO_LINK, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, f"{name} is a link") from None
        if error.errno == errno.ENXIO:  # a FIFO that nobody reads, or a socket
            raise OSError(errno.ELOOP, f"{name} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ELOOP, f"{name} is not a regular file")
    return handle


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


def make_folder(path: Path, exist_ok: bool = False) -> None:
    path.mkdir(exist_ok=exist_ok)


def remove_folder(path: Path) -> None:
    """An empty one."""
    path.rmdir()


def remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """A folder and all that is in it, one after another. ignore_errors: what cannot be removed stays."""
    shutil.rmtree(path, ignore_errors=ignore_errors)
