"""Every persistent write of the package: whole or absent after a kill, on the disk when the call returns.

A file is written under a hidden temporary name beside its place, flushed to the disk, moved there by one rename, and
the folder is flushed as well, so that a reader sees the old content or the new and a power failure loses neither.
`staged_folder` does the same for a folder. The trade-off: a flush costs milliseconds, so nothing here belongs in an
inner loop. Failures of the disk are EnvironmentFaults that name the path and leave no temporary file behind.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from surefoot.errors import EnvironmentFault, Fault

_REPLACED = ".replaced-"
_CHUNK = 1 << 20  # bytes per read when hashing
_ADVICE = {
    errno.ENOSPC: "free some space or write to another disk",
    errno.EDQUOT: "your disk quota is used up: free some space or write to another disk",
    errno.EACCES: "choose a folder that you may write to",
    errno.EPERM: "choose a folder that you may write to",
    errno.EROFS: "choose a folder that you may write to",
    errno.EEXIST: "it exists already: choose another name or remove it",
    errno.ENOTEMPTY: "it exists already: choose another name or remove it",
}


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the content of `path`. The mode obeys umask. Raises EnvironmentFault; the old content then stands."""
    with _replacement(Path(path)) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """`write_bytes` in UTF-8, line ends as they are."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Readable JSON, UTF-8, keys in the order given. NaN and infinity raise ValueError: they are not JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def copy_file(source: Path, path: Path) -> None:
    """`write_bytes` with the content of `source`, a piece at a time."""
    with open(source, "rb") as original, _replacement(Path(path)) as file:
        shutil.copyfileobj(original, file, _CHUNK)


def append_line(path: Path, text: str) -> None:
    """Add one line to a log: all of it or nothing.

    It survives the end of this process at once, but a power failure only after `flush`.
    """
    if "\n" in text:
        raise ValueError("a line holds no line end")
    rest = memoryview(f"{text}\n".encode())
    with _faults_named(Path(path)), open(path, "ab", buffering=0) as file:
        start = file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(start)  # else the next line would be glued to half of this one
            raise


def flush(path: Path) -> None:
    """Return when everything appended to `path` so far is on the disk."""
    with _faults_named(path):
        _sync(path)


@contextmanager
def staged_folder(final: Path, replace: bool = False) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `final` when the block ends and disappears when it raises.

    Before the rename every file is flushed to the disk and takes the folder's umask-given mode (some writers create
    private files). A `final` that holds anything is an EnvironmentFault, unless `replace`: then it is moved aside for
    the moment between two renames; `restore_replaced` undoes a kill in that moment.
    """
    final = Path(final)
    staging = _hidden_beside(final)
    with _faults_named(final):
        try:
            staging.mkdir(parents=True)
            yield staging
            mode = staging.stat().st_mode & 0o666
            for path in sorted(staging.rglob("*"), reverse=True):  # children before their folders
                if path.is_file():
                    path.chmod(mode)
                _sync(path)
            _sync(staging)
            aside = final.parent / f"{_REPLACED}{final.name}"
            if replace and final.exists():
                os.rename(final, aside)
            os.rename(staging, final)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        _sync(final.parent)
        shutil.rmtree(aside, ignore_errors=True)


def restore_replaced(parent: Path) -> None:
    """After a kill: a folder that was moved aside and not yet replaced goes back to its place."""
    for aside in parent.glob(f"{_REPLACED}*"):
        final = parent / aside.name.removeprefix(_REPLACED)
        with _faults_named(final):
            if final.exists():
                shutil.rmtree(aside)
            else:
                os.rename(aside, final)


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def _replacement(path: Path) -> Iterator[BinaryIO]:
    """A hidden file to fill, which takes the place of `path` when the block ends and disappears when it raises."""
    staging = _hidden_beside(path)
    with _faults_named(path):
        try:
            with open(staging, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, path)
        except BaseException:
            with suppress(OSError):
                staging.unlink()
            raise
        _sync(path.parent)


def _hidden_beside(path: Path) -> Path:
    """In the same folder, so that the rename stays within one file system; hidden, so that no reader picks it up."""
    return path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp"


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk. Windows cannot open folders; it flushes renames by itself."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _faults_named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "")
        raise EnvironmentFault(Fault(str(path), f"cannot be written: {reason}", advice)) from error
