"""Manifests: the files of a published folder with their sizes and SHA-256 hashes.

`MANIFEST.json` is written last and contains a hash of itself. safetensors loads flipped bits without an error, so only
the hashes show that a folder is intact.
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
_WITHOUT_DIGEST = 1  # the previous schema, without a hash of the manifest itself
_DIGEST = "sha256"
CHANGED = "was changed after it was written (SHA-256 differs)"


def damaged(where: object, what: str, fix: str = "") -> Fault:
    """Make the fault of a file or folder that was changed after it was written.

    where: path or name.
    """
    return Fault(str(where), what, fix, code="SF-CHECKPOINT-DAMAGED")


def unreadable(where: object, error: Exception, fix: str = "") -> Fault:
    """Make the fault of a file that cannot be read: damaged, unless the operating system refused to read it.

    where: path or name.
    error: exception from reading it; gzip's own errors are OSErrors without errno.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return Fault(str(where), f"cannot be read: {error.strerror or error}", fix, code="SF-FILE-UNREADABLE")
    return damaged(where, f"cannot be read: {type(error).__name__}: {error}", fix)


def manifest(folder: Path, paths: Sequence[Path], step: int, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Make the manifest of the files among `paths`, all of which are in `folder`."""
    files = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": durable.sha256_file(path)}
        for path in paths
        if path.is_file()
    }
    return sealed({"schema": SCHEMA, "step": step, "identity": identity, "files": files})


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the manifest with the SHA-256 of its other content."""
    rest = {key: value for key, value in content.items() if key != _DIGEST}
    return {**rest, _DIGEST: hashlib.sha256(durable.json_text(rest).encode()).hexdigest()}


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read a folder's manifest. Raises IntegrityError if it is missing, incomplete, changed or of an unknown schema."""
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
        raise IntegrityError(damaged(path, "lacks required entries, or names files outside of its folder"))
    if schema == SCHEMA and not _as_written(text, content):
        raise IntegrityError(damaged(path, CHANGED))
    if schema == _WITHOUT_DIGEST and _DIGEST in content:
        raise IntegrityError(damaged(path, f"was changed after it was written: its schema was {SCHEMA}"))
    return content


def _as_written(text: str, content: Mapping[str, Any]) -> bool:
    try:
        # The text too: a key written twice, of which a parser keeps one, changes no parsed value.
        return text == durable.json_text(content) and sealed(content) == content
    except ValueError:  # a NaN or an infinity, which is never written
        return False


def _is_whole(content: Any) -> bool:
    """Whether a manifest has all entries, and names only files below its folder."""
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
    """Result of checking one file of a manifest.

    fault: what is wrong with it; None if it is intact.
    """

    name: str
    size: int
    sha256: str
    fault: Fault | None


def check_files(folder: Path, hashed_up_to: int | None = None) -> list[FileCheck]:
    """Check every file of the folder's manifest. Raises IntegrityError if the manifest itself is invalid.

    hashed_up_to: largest size in bytes to hash; for larger files only the size is checked.
    """
    return check_against(folder, read_manifest(folder)["files"], hashed_up_to)


def check_against(
    folder: Path, files: Mapping[str, Mapping[str, Any]], hashed_up_to: int | None = None
) -> list[FileCheck]:
    """Check a folder's files against recorded sizes and hashes.

    files: name -> {"size": bytes, "sha256": hash}.
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
    except OSError as error:  # such as an unreadable sector
        return unreadable(path, error)
    if not same:
        return damaged(path, CHANGED)
    return None
