"""All operations that change a disk, one function each. Only `durable` calls them.

They are as thin as the system calls, so that a test can replace them: to record calls, to fail the n-th one, to write
only a part, or to end the process as a kill would.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from io import FileIO
from pathlib import Path

# Do not follow links, and do not wait for a FIFO's other end. Windows has neither flag.
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


def create(path: Path) -> FileIO:
    """Create a file and open it for writing. Raises OSError if it exists."""
    return open(path, "xb", buffering=0)


def open_end(path: Path) -> FileIO:
    """Open a file for appending, creating it if missing. Raises OSError for a link or anything but a regular file."""
    return open(path, "ab", buffering=0, opener=open_itself)


def open_itself(path: str | Path, flags: int) -> int:
    """Open a file without following links, and return its handle. Raises OSError for a link, a FIFO or a device. flags:
    of `os.open`. Children do not inherit the handle."""
    name = os.path.basename(path)
    try:
        handle = os.open(path, flags | _NO_LINK, 0o666)
    except OSError as error:
        if os.path.islink(path):
            raise OSError(errno.ELOOP, f"{name} is a link") from None
        if error.errno == errno.ENXIO:  # a FIFO without a reader, or a socket
            raise OSError(errno.ELOOP, f"{name} is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.ELOOP, f"{name} is not a regular file")
    return handle


def write(file: FileIO, data: memoryview) -> int:
    """Write and return the number of bytes written, which can be fewer on a nearly full disk."""
    return file.write(data)


def truncate(file: FileIO, size: int) -> None:
    file.truncate(size)


def sync_file(file: FileIO) -> None:
    """Flush a file's content to the disk."""
    os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Flush a file's content or a folder's entries to the disk. Windows cannot open folders and flushes renames
    itself."""
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
    """Rename; does not replace a non-empty folder."""
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    os.replace(source, target)


def unlink(path: Path) -> None:
    path.unlink()


def make_folder(path: Path, exist_ok: bool = False) -> None:
    path.mkdir(exist_ok=exist_ok)


def remove_folder(path: Path) -> None:
    """Remove an empty folder."""
    path.rmdir()


def remove_tree(path: Path, ignore_errors: bool = False) -> None:
    """Remove a folder with its content. ignore_errors: skip what cannot be removed."""
    shutil.rmtree(path, ignore_errors=ignore_errors)
