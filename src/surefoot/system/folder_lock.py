"""Locks of run folders: one process works in a folder at a time.

The kernel holds a lock and drops it with its process, however that ends; the lock's file says who holds it.
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

_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # file systems that keep none
_HOLDER = re.compile(rb"process ([0-9]{1,9}) on (.+)", re.DOTALL)  # what a lock file says
_LONGEST = 200  # bytes of it


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only process that works in `folder` (made if missing) while the block runs.

    The kernel holds the lock and drops it with the process, however that ends. Raises EnvironmentFault that names the
    holder, and where the lock's name is that of a link, of no file or of a file that is no lock, which stays as it is.
    Windows, and file systems that keep no locks, do without.
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
                disk.unlink(path)  # before the lock is dropped: afterwards the file may be another's
            os.close(handle)


def is_in_use(folder: Path) -> bool:
    """Whether a process holds `locked(folder)`, by the name in its lock file: to try the lock would keep out a run that
    starts in that moment. A process on another machine counts for as long as its file stands."""
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
    except PermissionError:  # it is there, and another user's
        return True
    return True


def _lock(path: Path) -> int:
    """The open lock file, locked and with the name of this process in it."""
    while True:
        # Opened and locked are two moments: in between the holder may remove the file, and another make it anew.
        handle = disk.open_itself(path, os.O_RDWR | os.O_CREAT)
        try:
            if os.fstat(handle).st_nlink > 1:  # what is written here would stand in another's file
                raise OSError(errno.ELOOP, f"{path.name} is a second name of another file")
            _require_lock_file(handle, path)
            _flock(handle, path)
            current = path.exists() and os.path.samestat(os.fstat(handle), path.stat())
            if current:
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {os.uname().nodename}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its holder removed it in between: this one would keep nobody out


def _require_lock_file(handle: int, path: Path) -> None:
    """OSError for another program's file, whose content would be lost. Nothing, or zeros after a power failure, is what
    a process leaves that ended before it wrote its name."""
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
