"""Every persistent write of the package: whole or absent after a kill, on the disk when the call returns.

A file is written under a hidden temporary name beside its place, flushed to the disk, moved there by one rename, and
the folder is flushed as well, so that a reader sees the old content or the new and a power failure loses neither.
`staged_folder` does the same for a folder. The trade-off: a flush costs milliseconds, so nothing here belongs in an
inner loop. Failures of the disk are EnvironmentFaults that name the path and leave no temporary file behind. All that
changes the disk goes through `disk`, where tests make it fail.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import takewhile
from pathlib import Path
from typing import Any

from surefoot.system import disk
from surefoot.system.errors import EnvironmentFault, Fault

LOCK = ".lock"
_TEMPORARY = re.compile(r"\..+\.\d+-[0-9a-f]{8}\.tmp", re.DOTALL)  # what `_hidden_beside` makes
_REPLACED = ".replaced-"
_CHUNK = 1 << 20  # bytes per read when hashing
_ABANDONED = 3 * 24 * 3600  # seconds without a change after which nobody is at work any more
_unfinished: set[Path] = set()  # hidden files and folders that this process is filling
_ADVICE = {
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "your disk quota is used up: free some space or write to another disk",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.ELOOP: "remove it, or name another folder",
    errno.EEXIST: "it exists already: choose another name or remove it",
    errno.ENOTEMPTY: "it exists already: choose another name or remove it",
}


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`. The mode obeys umask. Raises EnvironmentFault; the old content then stands."""
    with _replacement(Path(path)) as file:
        write_all(file, data)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8, line ends as they are."""
    write_bytes(path, text.encode("utf-8"))


def make_executable(path: Path) -> None:
    """Whoever may read a file may start it."""
    with faults_named(path):
        mode = path.stat().st_mode
        disk.chmod(path, mode | (mode & 0o444) >> 2)


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, UTF-8, keys in the order given. NaN and infinity raise ValueError: they are not JSON."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    """What `write_json` writes."""
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def copy_file(source: Path, path: Path) -> None:
    """`write_bytes` with the content of `source`, a piece at a time."""
    with open(source, "rb") as original, _replacement(Path(path)) as file:
        while chunk := original.read(_CHUNK):
            write_all(file, chunk)


def fill_bytes(path: Path, data: bytes) -> None:
    """A new file in a folder that `staged_folder` is about to flush: not flushed here."""
    with faults_named(Path(path)), disk.create(path) as file:
        write_all(file, data)


def fill_json(path: Path, value: Any) -> None:
    """`fill_bytes` with what `write_json` writes."""
    fill_bytes(path, json_text(value).encode("utf-8"))


@contextmanager
def filling(path: Path) -> Iterator[FileIO]:
    """A new file in a folder that `staged_folder` is about to flush, to be filled by `write_all`."""
    with disk.create(path) as file:
        yield file


def append_line(path: Path, text: str) -> None:
    """Add one line to a log: all of it or nothing.

    It survives the end of this process at once, but a power failure only after `flush`.
    """
    if "\n" in text:
        raise ValueError("a line holds no line end")
    with faults_named(Path(path)), disk.open_end(path) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            write_all(file, f"{text}\n".encode())
        except OSError:
            disk.truncate(file, start)  # else the next line would be glued to half of this one
            raise


@contextmanager
def held_open(path: Path) -> Iterator[FileIO]:
    """A log, open at its end for a writer that cannot open it when it has something to say."""
    with faults_named(Path(path)):
        file = disk.open_end(path)
    with file:
        yield file


def flush(path: Path) -> None:
    """Return when everything appended to `path` so far is on the disk."""
    with faults_named(path):
        disk.sync(path)


def make_folders(path: Path) -> None:
    """A folder and those above it, where they are missing. Their names are on the disk when the call returns: else a
    power failure could take away the place of all that is written into it."""
    path = Path(path)
    with faults_named(path):
        if path.is_dir():
            return
        missing = [path, *takewhile(lambda one: not one.exists(), path.parents)]
        for one in reversed(missing):
            disk.make_folder(one, exist_ok=True)
            with suppress(PermissionError):  # a folder that may be written to and not read cannot be flushed
                disk.sync(one.parent)


@contextmanager
def staged_folder(final: Path, replace: bool = False) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `final` when the block ends and disappears when it raises.

    Before the rename every file is flushed to the disk and takes the folder's umask-given mode (some writers create
    private files). A `final` that holds anything is an EnvironmentFault, unless `replace`: then it is moved aside for
    the moment between two renames; `restore_replaced` undoes a kill in that moment.
    """
    final = Path(final)
    staging = _hidden_beside(final)
    with faults_named(final), _filling(staging):
        try:
            make_folders(final.parent)
            disk.make_folder(staging)
            yield staging
            # Content before names: what a reader finds under the final name has to be on the disk.
            mode = staging.stat().st_mode & 0o666
            for path in sorted(staging.rglob("*"), reverse=True):  # children before their folders
                if path.is_file():
                    disk.chmod(path, mode)
                disk.sync(path)
            disk.sync(staging)
            aside = final.parent / f"{_REPLACED}{final.name}"
            if replace and final.exists():
                disk.rename(final, aside)
            disk.rename(staging, final)
        except BaseException:
            disk.remove_tree(staging, ignore_errors=True)
            raise
        disk.sync(final.parent)
        disk.remove_tree(aside, ignore_errors=True)


def restore_replaced(parent: Path) -> None:
    """After a kill: a folder that was moved aside and not yet replaced goes back to its place."""
    for aside in parent.glob(f"{_REPLACED}*"):
        final = parent / aside.name.removeprefix(_REPLACED)
        with faults_named(final):
            if final.exists():
                disk.remove_tree(aside) if _is_folder(aside) else disk.unlink(aside)
            else:
                disk.rename(aside, final)
                disk.sync(parent)


def remove(path: Path) -> None:
    """Delete a file, if it is there, or a folder, which is gone at once even where its deletion is interrupted."""
    with faults_named(path):
        if _is_folder(path):
            # Renamed first, so that no reader meets half of a folder, whenever this is interrupted.
            trash = _hidden_beside(path)
            disk.rename(path, trash)
            disk.remove_tree(trash)
        else:
            with suppress(FileNotFoundError):
                disk.unlink(path)
        disk.sync(path.parent)


def move(path: Path, target: Path) -> None:
    """Give a file or folder another name, in place of what has that name now."""
    with faults_named(path):
        if _is_folder(target):
            disk.remove_tree(target)
        disk.replace(path, target)
        disk.sync(target.parent)


def empty_folder(folder: Path, last: str, ours: Callable[[str], bool]) -> None:
    """Delete what is ours in a folder, which itself stays, with its lock.

    last: the file that stands until all else is gone.
    ours: whether a file or folder of this name may go.
    """
    with faults_named(folder):
        trash = _hidden_beside(folder / "emptied")
        disk.make_folder(trash)
        for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
            if path.name != LOCK and path != trash and (is_temporary(path) or ours(path.name)):
                disk.rename(path, trash / path.name)
        disk.remove_tree(trash)


def is_temporary(path: Path) -> bool:
    """Whether a name is one that only work in progress, or a kill in the middle of it, leaves."""
    return path.name == LOCK or _TEMPORARY.fullmatch(path.name) is not None


def discard_unfinished() -> None:
    """Remove what this process has begun to write and not finished; for a thread that is about to end the process by
    `os._exit`."""
    for path in list(_unfinished):
        if path.is_dir():
            disk.remove_tree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                disk.unlink(path)


def clear_temporary(folder: Path) -> None:
    """Remove the half-written files and folders of killed processes. Call it with the folder locked."""
    with faults_named(folder):
        for path in folder.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                disk.remove_tree(path) if _is_folder(path) else disk.unlink(path)


def clear_abandoned(folder: Path) -> None:
    """Remove the half-written files and folders in it that nothing was written to for days: whoever began them was
    killed, here or on another machine. For a folder that no process has to itself."""
    oldest = time.time() - _ABANDONED
    for path in folder.iterdir():
        with suppress(OSError):  # another process was faster
            parts = [path, *(path.iterdir() if _is_folder(path) else ())]
            if _TEMPORARY.fullmatch(path.name) and all(part.stat().st_mtime < oldest for part in parts):
                disk.remove_tree(path) if _is_folder(path) else disk.unlink(path)


def nearest_existing(path: Path) -> Path:
    """The path itself, absolute, or the nearest folder above it that is there and may be seen."""
    place = path.absolute()
    while not os.path.exists(place):
        place = place.parent
    return place


def require_writable(folder: Path) -> None:
    """EnvironmentFault unless a folder can be made where `folder` is or would be. Tried, for permission bits tell less:
    they know nothing of read-only disks, of /proc, of quotas."""
    probe = _hidden_beside(nearest_existing(Path(os.path.realpath(folder))) / "probe")
    with faults_named(folder):
        disk.make_folder(probe)
        disk.remove_folder(probe)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _replacement(path: Path) -> Iterator[FileIO]:
    """A hidden file to fill, which takes the place of `path` when the block ends and disappears when it raises."""
    staging = _hidden_beside(path)
    with faults_named(path), _filling(staging):
        try:
            with disk.create(staging) as file:
                yield file
                # Before the rename: else a power failure could leave the new name with nothing in it.
                disk.sync_file(file)
            disk.replace(staging, path)
        except BaseException:
            # The error that stopped the write is the one to tell, not that its rest stayed.
            with suppress(OSError):
                disk.unlink(staging)
            raise
        disk.sync(path.parent)


def write_all(file: FileIO, data: bytes) -> None:
    """All of the data, though a disk may take less than it is given, which is no error of its own."""
    rest = memoryview(data)
    while rest:
        taken = disk.write(file, rest)
        if not taken:  # nor refused: this would go on for ever
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
    """Itself, and not by a link to one: what lies behind a link is another's."""
    return path.is_dir() and not path.is_symlink()


def _hidden_beside(path: Path) -> Path:
    """In the same folder, so that the rename stays within one file system; hidden, so that no reader picks it up."""
    return path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


@contextmanager
def faults_named(path: Path) -> Iterator[None]:
    """What the disk refuses in the block, as an EnvironmentFault that names `path`."""
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        code = "SF-DISK-FULL" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "SF-FILE-WRITE"
        raise EnvironmentFault(Fault(str(path), what, _ADVICE.get(error.errno or 0, ""), code=code)) from error
