"""Manifests: what files a folder was published with, by size and SHA-256.

`MANIFEST.json` is written last, and vouches for itself as well: safetensors loads flipped bits without complaint, so
the hashes are what makes a folder trustworthy.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from surefoot.system import durable, plain_files
from surefoot.system.errors import Fault, IntegrityError
from surefoot.system.folders import MANIFEST as MANIFEST

SCHEMA = 2
_WITHOUT_DIGEST = 1  # the schema before: its manifests say nothing of themselves
_DIGEST = "sha256"
CHANGED = "has another content than was written (SHA-256 differs)"


def damaged(where: object, what: str, fix: str = "") -> Fault:
    """The fault of a file or folder that is not as it was written.

    where: its path, or its name.
    """
    return Fault(str(where), what, fix, code="SF-CHECKPOINT-DAMAGED")


def unreadable(where: object, error: Exception, fix: str = "") -> Fault:
    """The fault of a file that could not be read: damaged, unless the system refused it before its bytes were seen.

    where: its path, or its name.
    error: what reading it raised; gzip's own errors are an OSError without a number.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return Fault(str(where), f"cannot be read: {error.strerror or error}", fix, code="SF-FILE-UNREADABLE")
    return damaged(where, f"cannot be read: {type(error).__name__}: {error}", fix)


def manifest(folder: Path, paths: Sequence[Path], step: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and hashes of the files among `paths`, which lie in `folder`."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": durable.sha256_file(path)}
        for path in paths
        if path.is_file()
    }
    return sealed({"schema": SCHEMA, "step": step, "identity": identity, "files": files})


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the SHA-256 of all else in it, as it is written."""
    rest = {key: value for key, value in content.items() if key != _DIGEST}
    return {**rest, _DIGEST: hashlib.sha256(durable.json_text(rest).encode()).hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; IntegrityError when it is missing, torn, changed or of another schema."""
    path = folder / MANIFEST
    try:
        text = plain_files.read_text(path)
        content = json.loads(text)
        schema = content["schema"]
    except FileNotFoundError:
        raise IntegrityError(damaged(path, "is missing: this checkpoint was never finished")) from None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(unreadable(path, error)) from None
    if schema not in (SCHEMA, _WITHOUT_DIGEST):
        raise IntegrityError(damaged(path, f"has schema {schema}; this version of surefoot reads {SCHEMA}"))
    if not _is_whole(content):
        raise IntegrityError(damaged(path, "lacks what a manifest has, or names files outside its folder"))
    if schema == SCHEMA and not _as_written(text, content):
        raise IntegrityError(damaged(path, CHANGED))
    if schema == _WITHOUT_DIGEST and _DIGEST in content:
        raise IntegrityError(damaged(path, f"has another content than was written: its schema was {SCHEMA}"))
    return content


def _as_written(text: str, content: Mapping[str, Any]) -> bool:
    try:
        return text == durable.json_text(content) and sealed(content) == content
    except ValueError:  # a NaN or an infinity, which is never written
        return False


def _is_whole(content: Any) -> bool:
    """Of the right form, with names of files below its folder."""
    match content:
        case {"step": int(), "identity": dict(), "files": dict(files)}:
            return all(_is_entry(name, entry) for name, entry in files.items())
    return False


def _is_entry(name: str, entry: Any) -> bool:
    match entry:
        case {"size": int(), "sha256": str()}:
            path = PurePosixPath(name)
            return not path.is_absolute() and ".." not in path.parts
    return False


@dataclass(frozen=True)
class FileCheck:
    """One file of a manifest.

    fault: what is wrong with it, None when every byte is as it was written.
    """

    name: str
    size: int
    sha256: str
    fault: Fault | None


def check_files(folder: Path, hashed_up_to: int | None = None) -> list[FileCheck]:
    """Hash every file that the folder's manifest names. IntegrityError when the manifest itself cannot be used.

    hashed_up_to: of files with more bytes only the size is looked at.
    """
    return check_against(folder, read_manifest(folder)["files"], hashed_up_to)


def check_against(
    folder: Path, files: Mapping[str, Mapping[str, Any]], hashed_up_to: int | None = None
) -> list[FileCheck]:
    """Hold a folder's files against their recorded sizes and hashes.

    files: name -> `size` in bytes and `sha256`, as they were written.
    hashed_up_to: as in `check_files`.
    """
    if outside := [name for name, entry in files.items() if not _is_entry(name, entry)]:
        raise IntegrityError(damaged(folder, f"{outside[0]!r} is not a file of this folder with size and SHA-256"))
    return [
        FileCheck(name, expected["size"], expected["sha256"], _file_fault(folder / name, expected, hashed_up_to))
        for name, expected in files.items()
    ]


def _file_fault(path: Path, expected: Mapping[str, Any], hashed_up_to: int | None) -> Fault | None:
    if not path.is_file():
        return damaged(path, "is missing")
    if path.stat().st_size != expected["size"]:
        return damaged(path, f"has {path.stat().st_size} bytes, not {expected['size']}")
    hashed = hashed_up_to is None or expected["size"] <= hashed_up_to
    try:
        same = not hashed or durable.sha256_file(path) == expected["sha256"]
    except OSError as error:  # as a disk says of a sector that it has lost
        return unreadable(path, error)
    if not same:
        return damaged(path, CHANGED)
    return None
