"""All persistent writes of the package: complete or absent after a kill, and on the disk when the call returns.

A file is written under a hidden temporary name in the same folder, flushed, and renamed; then the folder is flushed. So
a reader sees the old content or the new one, and a power failure loses neither. `staged_folder` does the same for a
folder. The trade-off: a flush costs milliseconds, so nothing here belongs in an inner loop. Disk errors are
EnvironmentFaults that name the path and leave no temporary file. All changes go through `disk`, where tests make them
fail.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from surefoot.system import disk
from surefoot.system.errors import EnvironmentFault, Fault

LOCK = ".lock"
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp", re.DOTALL)  # names made by `_hidden_beside`
_REPLACED = ".replaced-"
_CHUNK = 1 << 20  # bytes per read when hashing
_ABANDONED = 3 * 24 * 3600  # seconds without a change after which a file counts as abandoned
_unfinished: set[Path] = set()  # hidden files and folders that this process is writing
_ADVICE = {
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "your disk quota is used up: free some space or write to another disk",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ELOOP: "remove it, or name another folder",
    errno.EEXIST: "it already exists: choose another name or remove it",
    errno.ENOTEMPTY: "it already exists: choose another name or remove it",
}


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`, with a mode by umask. Raises EnvironmentFault; the old content is then kept."""
    write_parts(path, (data,))


def write_parts(path: Path, parts: Iterable[bytes]) -> None:
    """Like `write_bytes`, one part after the other; they may be read from the old content."""
    with _replacement(Path(path)) as file:
        for part in parts:
            write_all(file, part)


def write_text(path: Path, text: str) -> None:
    """Like `write_bytes`, encoded as UTF-8, with line ends unchanged."""
    write_bytes(path, text.encode("utf-8"))


def make_executable(path: Path) -> None:
    """Make a file executable for everyone who may read it."""
    with faults_named(path):
        mode = path.stat().st_mode
        disk.chmod(path, mode | (mode & 0o444) >> 2)


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON as UTF-8, with keys in the given order. Raises ValueError for NaN and infinity."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """The text that `write_json` writes."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def copy_file(source: Path, path: Path) -> None:
    """Like `write_bytes` with the content of `source`, in chunks."""
    with open(source, "rb") as original, _replacement(Path(path)) as file:
        while chunk := original.read(_CHUNK):
            write_all(file, chunk)


def fill_bytes(path: Path, data: bytes) -> None:
    """Write a new file in a folder of `staged_folder`, which flushes it later."""
    with faults_named(Path(path)), disk.create(path) as file:
        write_all(file, data)


def fill_json(path: Path, value: Any) -> None:
    """Like `fill_bytes`, with JSON as by `write_json`."""
    fill_bytes(path, json_text(value).encode("utf-8"))


@contextmanager
def filling(path: Path) -> Iterator[FileIO]:
    """Open a new file in a folder of `staged_folder`, to be written with `write_all`."""
    with disk.create(path) as file:
        yield file


def append_lines(path: Path, *lines: str) -> None:
    """Append lines to a log, completely or not at all.

    They survive the end of this process at once, but a power failure only after `flush`.
    """
    if any("\n" in line for line in lines):
        raise ValueError("a line holds no line end")
    with faults_named(Path(path)), disk.open_end(path) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            write_all(file, "".join(f"{line}\n" for line in lines).encode())
        except OSError:
            disk.truncate(file, start)  # otherwise the next line would follow half of this one
            raise


@contextmanager
def held_open(path: Path) -> Iterator[FileIO]:
    """Open a log for appending, for a writer that cannot open files later (a signal handler)."""
    with faults_named(Path(path)):
        file = disk.open_end(path)
    with file:
        yield file


def shorten(path: Path, size: int) -> None:
    """Cut a log to its first `size` bytes; it must have as many."""
    with faults_named(path), disk.open_end(path) as file:
        disk.truncate(file, size)
        disk.sync_file(file)


def flush(path: Path) -> None:
    """Flush everything appended to `path` so far to the disk."""
    with faults_named(path):
        disk.sync(path)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents. Their names are flushed to the disk; otherwise a power failure could
    lose everything written into them."""
    path = Path(path)
    with faults_named(path):
        if path.is_dir():
            return
        missing = [path, *takewhile(lambda one: not one.exists(), path.parents)]
        for one in reversed(missing):
            disk.make_folder(one, exist_ok=True)
            with suppress(PermissionError):  # a folder without read permission cannot be flushed
                disk.sync(one.parent)


@contextmanager
def staged_folder(final: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a hidden folder that becomes `final` at the end of the block and is removed if the block raises.

    Before the rename every file is flushed and gets the folder's mode by umask (some writers create private files).
    A non-empty `final` raises EnvironmentFault, unless `replace`: then it is moved aside between two renames;
    `restore_replaced` repairs a kill in between.
    """
    final = Path(final)
    staging = _hidden_beside(final)
    with faults_named(final), _filling(staging):
        try:
            make_folders(final.parent)
            disk.make_folder(staging)
            yield staging
            # Flush content before the rename, so that everything under the final name is on the disk.
            mode = staging.stat().st_mode & 0o666
            for path in sorted(staging.rglob("*"), reverse=True):  # children before their folders
                if path.is_file():
                    disk.chmod(path, mode)
                disk.sync(path)
            disk.sync(staging)
            # A rename cannot replace a folder that is not empty, so for a moment there is none of the name.
            aside = final.parent / f"{_REPLACED}{final.name}"
            if replace and final.exists():
                disk.remove_tree(aside, ignore_errors=True)  # left where this was killed after it had replaced `final`
                disk.rename(final, aside)
            disk.rename(staging, final)
        except BaseException:
            disk.remove_tree(staging, ignore_errors=True)
            raise
        # The new name is on the disk only once its folder is.
        disk.sync(final.parent)
        disk.remove_tree(aside, ignore_errors=True)


def restore_replaced(parent: Path) -> None:
    """Move a folder back that a killed `staged_folder` had moved aside and not yet replaced."""
    for aside in parent.glob(f"{_REPLACED}*"):
        final = parent / aside.name.removeprefix(_REPLACED)
        with faults_named(final):
            if final.exists():
                disk.remove_tree(aside) if _is_folder(aside) else disk.unlink(aside)
            else:
                disk.rename(aside, final)
                disk.sync(parent)


def remove(path: Path) -> None:
    """Delete a file if it exists, or a folder, which disappears at once even if the deletion is interrupted."""
    with faults_named(path):
        if _is_folder(path):
            # Renamed first, so that readers never see half of a folder.
            trash = _hidden_beside(path)
            disk.rename(path, trash)
            disk.remove_tree(trash)
        else:
            with suppress(FileNotFoundError):
                disk.unlink(path)
        disk.sync(path.parent)  # or it could be back after a power failure


def move(path: Path, target: Path) -> None:
    """Rename a file or folder, replacing the target."""
    with faults_named(path):
        if _is_folder(target):
            disk.remove_tree(target)
        disk.replace(path, target)
        disk.sync(target.parent)


def empty_folder(folder: Path, last: str, ours: Callable[[str], bool]) -> None:
    """Delete surefoot's files in a folder, but not the folder itself or its lock.

    last: the file that is deleted last.
    ours: whether a file or folder of this name may be deleted.
    """
    with faults_named(folder):
        trash = _hidden_beside(folder / "emptied")
        disk.make_folder(trash)
        # Moved into one hidden folder first: deleting takes long, renaming does not. After a kill in between, `last`
        # still marks the folder as what it was.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
            if path.name != LOCK and path != trash and (is_temporary(path) or ours(path.name)):
                disk.rename(path, trash / path.name)
        disk.remove_tree(trash)


def is_temporary(path: Path) -> bool:
    """Whether a name is that of an unfinished write, in progress or interrupted by a kill."""
    return path.name == LOCK or _TEMPORARY.fullmatch(path.name) is not None


def discard_unfinished() -> None:
    """Remove this process's unfinished writes; for a thread that is about to call `os._exit`."""
    # A copy: the main thread may still change the set.
    for path in list(_unfinished):
        if path.is_dir():
            disk.remove_tree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                disk.unlink(path)


def clear_temporary(folder: Path) -> None:
    """Remove the unfinished writes of killed processes. Call it with the folder locked."""
    with faults_named(folder):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                disk.remove_tree(path) if _is_folder(path) else disk.unlink(path)


def clear_abandoned(folder: Path) -> None:
    """Remove unfinished writes that did not change for days: their process was killed, here or on another machine. For
    folders that several processes share."""
    oldest = time.time() - _ABANDONED
    for path in folder.iterdir():
        with suppress(OSError):  # another process removed it first
            parts = [path, *(path.iterdir() if _is_folder(path) else ())]
            if _TEMPORARY.fullmatch(path.name) and all(part.stat().st_mtime < oldest for part in parts):
                disk.remove_tree(path) if _is_folder(path) else disk.unlink(path)


def nearest_existing(path: Path) -> Path:
    """The absolute path itself, or its nearest existing and accessible parent."""
    place = path.absolute()
    while not os.path.exists(place):
        place = place.parent
    return place


def require_writable(folder: Path) -> None:
    """Raises EnvironmentFault unless a folder can be created at `folder`. Tests by creating one, because permission
    bits do not show read-only disks, /proc or quotas."""
    probe = _hidden_beside(nearest_existing(Path(os.path.realpath(folder))) / "probe")
    with faults_named(folder):
        disk.make_folder(probe)
        try:
            disk.remove_folder(probe)
        except OSError:
            with suppress(OSError):
                disk.remove_folder(probe)  # a disk that fails once leaves nothing behind
            raise


def sha256_file(path: Path, size: int | None = None) -> str:
    """Hexadecimal SHA-256 of a file's content, or of its first `size` bytes."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        left = sys.maxsize if size is None else size
        while chunk := file.read(min(_CHUNK, left)):
            digest.update(chunk)
            left -= len(chunk)
    return digest.hexdigest()


@contextmanager
def _replacement(path: Path) -> Iterator[FileIO]:
    """Yield a hidden file that replaces `path` at the end of the block and is removed if the block raises."""
    staging = _hidden_beside(path)
    with faults_named(path), _filling(staging):
        try:
            with disk.create(staging) as file:
                yield file
                # Flush before the rename: otherwise a power failure could leave an empty file under the new name.
                disk.sync_file(file)
            disk.replace(staging, path)
        except BaseException:
            # Report the original error, not that the temporary file could not be removed.
            with suppress(OSError):
                disk.unlink(staging)
            raise
        # The new name is on the disk only once its folder is.
        disk.sync(path.parent)


def write_all(file: FileIO, data: bytes) -> None:
    """Write all of the data, continuing after short writes."""
    rest = memoryview(data)
    while rest:
        taken = disk.write(file, rest)
        if not taken:  # no error either: avoid an endless loop
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        rest = rest[taken:]


@contextmanager
def _filling(path: Path) -> Iterator[None]:
    _unfinished.add(path)
    try:
        yield
    finally:
        _unfinished.discard(path)


def _is_folder(path: Path) -> bool:
    """Whether it is a real folder: a link could lead to somebody else's."""
    return path.is_dir() and not path.is_symlink()


def _hidden_beside(path: Path) -> Path:
    """A temporary name in the same folder, so that the rename stays in one file system; hidden from readers."""
    return path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


@contextmanager
def faults_named(path: Path) -> Iterator[None]:
    """Turn disk errors in the block into an EnvironmentFault that names `path`."""
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        code = "SF-DISK-FULL" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "SF-FILE-WRITE"
        raise EnvironmentFault(Fault(str(path), what, _ADVICE.get(error.errno or 0, ""), code=code)) from error
