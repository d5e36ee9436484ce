"""Locks of run folders: only one process works in a folder at a time.

The kernel holds the lock and releases it when the process ends; the lock file names the holder.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surefoot.system import disk, durable
from surefoot.system.durable import LOCK, faults_named
from surefoot.system.errors import EnvironmentFault, Fault

if sys.platform != "win32":
    import fcntl

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # from file systems without locks
_HOLDER = re.compile(rb"process ([0-9]{1,9}) on (.+)", re.DOTALL)  # content of a lock file
_LONGEST = 200  # bytes read of a lock file


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: be the only process that works in `folder` (created if missing).

    The kernel releases the lock when the process ends. Raises EnvironmentFault, naming the holder, if the folder is
    locked, and if the lock file is a link, no regular file or somebody else's file, which is left unchanged. Without
    effect on Windows and file systems without locks.
    """
    path = Path(folder) / LOCK
    with faults_named(Path(folder)):
        durable.make_folders(path.parent)
        if sys.platform == "win32":
            handle = None
        else:
            handle = _lock(path)
    try:
        yield
    finally:
        if handle is not None:
            with suppress(OSError):
                disk.unlink(path)  # before releasing the lock: afterwards the file may belong to another process
            os.close(handle)


def is_in_use(folder: Path) -> bool:
    """Whether a process holds `locked(folder)`, by the name in its lock file. Trying the lock could block a run that is
    just starting. A process on another machine counts as long as its lock file exists."""
    path = Path(folder) / LOCK
    try:
        holder = _HOLDER.fullmatch(path.read_bytes()[:_LONGEST]) if path.is_file() and not path.is_symlink() else None
    except OSError:
        return False
    if holder is None:
        return False
    if sys.platform == "win32" or holder[2].decode("utf-8", "replace") != os.uname().nodename:
        return True
    try:
        os.kill(int(holder[1]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists and belongs to another user
        return True
    return True


def _lock(path: Path) -> int:
    """Open and lock the lock file and write this process's name into it."""
    while True:
        # Between opening and locking, the holder may remove the file and another process create it again.
        handle = disk.open_itself(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(handle).st_nlink > 1:  # writing would change somebody else's file
                raise OSError(errno.ELOOP, f"{path.name} is a second name of another file")
            _require_lock_file(handle, path)
            _flock(handle, path)
            current = path.exists() and os.path.samestat(os.fstat(handle), path.stat())
            if current:
                # Only now: until the lock is held the name in it is another process's.
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {os.uname().nodename}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed it in between, so this lock would be useless


def _require_lock_file(handle: int, path: Path) -> None:
    """Raises OSError for another program's file, whose content would be lost. Empty files, or zeros after a power
    failure, are left by processes that ended before they wrote their name."""
    found = os.pread(handle, _LONGEST + 1, 0)
    if found.strip(b"\0") and (len(found) > _LONGEST or _HOLDER.fullmatch(found) is None):
        raise OSError(errno.ELOOP, f"{path.name} is a file that surefoot did not write")


def _flock(handle: int, path: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(handle, _LONGEST).decode("utf-8", "replace").strip() or "another process"
        fault = Fault(
            str(path.parent),
            f"is in use by {holder}",
            "wait for it to end, or choose another folder",
            code="SF-FOLDER-BUSY",
        )
        raise EnvironmentFault(fault) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
