"""Scripts with the names that existing launch scripts call; each calls surefoot in a few lines.

They are in `scripts/`. Use `source compat/activate` in the repository, or `surefoot compat DIR` with the installed
package. See docs/dialects.md.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from surefoot.system import durable, plain_files
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

_ANY_PYTHON = b"#!/usr/bin/env python3\n"
_LONGEST = 127  # bytes of a shebang line that every system reads
REGISTRY = "data/dataset_info.json"  # LLaMA-Factory's list of datasets, which users edit
_RECORD = ".surefoot-scripts.json"  # name -> SHA-256 of each script as written into the folder


def write_scripts(folder: Path, *, overwrite: bool) -> list[str]:
    """Write the scripts into `folder`, with this Python as interpreter, and return their names.

    An existing registry of datasets is kept and not returned. Nothing is written if an error is raised.
    overwrite: replace scripts that another version wrote there.
    Raises InputError if `folder` is a run folder, if surefoot did not write one of the existing files, or if they
    differ and `overwrite` is off; EnvironmentFault if the folder is not writable.
    """
    if any((folder / name).is_file() for name in ("plan.json", "MANIFEST.json")):
        raise InputError(
            Fault(str(folder), "is a run folder", "name another folder, such as old-names", code="SF-USE-OUTPUT")
        )
    durable.require_writable(folder)
    with resources.as_file(resources.files(__name__) / "scripts") as scripts:
        files = {name: _with_python((scripts / name).read_bytes(), sys.executable) for name in _files(scripts)}
    if _is_other(folder / REGISTRY, files[REGISTRY]):
        del files[REGISTRY]
    changed = {name for name, ours in files.items() if _is_other(folder / name, ours)}
    written = _recorded(folder)
    if foreign := sorted(name for name in changed if _digest(folder / name) != written.get(name, "")):
        what = f"has files with these names that surefoot did not write: {first_few(foreign, 3)}"
        raise InputError(Fault(str(folder), what, "name another folder, or move them away", code="SF-USE-OUTPUT"))
    if changed and not overwrite:
        what = f"has files with these names that another version wrote: {first_few(sorted(changed), 3)}"
        raise InputError(Fault(str(folder), what, "name another folder, or add --overwrite", code="SF-USE-OUTPUT"))
    for name, ours in files.items():
        durable.make_folders((folder / name).parent)
        durable.write_bytes(folder / name, ours)
        if ours.startswith(b"#!"):  # wheels do not keep the file mode
            durable.make_executable(folder / name)
    digests = {name: hashlib.sha256(ours).hexdigest() for name, ours in files.items()}
    durable.write_json(folder / _RECORD, digests)
    return list(files)


def _files(scripts: Path) -> Iterator[str]:
    for path in sorted(scripts.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(scripts).as_posix()


def _with_python(script: bytes, python: str) -> bytes:
    """Return the script with `python` as interpreter, since another `python3` may not find surefoot. A shebang is
    limited in length and cannot be quoted, so a long path or one with a blank goes through sh, in lines that Python
    reads as a string."""
    if not script.startswith(_ANY_PYTHON) or not python:
        return script
    first = f"#!{python}\n"
    if len(first.encode()) > _LONGEST or any(letter.isspace() for letter in python):
        first = f"#!/bin/sh\n'''exec' {shlex.quote(python)} \"$0\" \"$@\"\n' '''\n"
    return first.encode() + script.removeprefix(_ANY_PYTHON)


def _is_other(path: Path, ours: bytes) -> bool:
    return os.path.lexists(path) and _digest(path) != hashlib.sha256(ours).hexdigest()


def _digest(path: Path) -> str | None:
    """Return the SHA-256 of a file, or None if it cannot be read."""
    try:
        return hashlib.sha256(plain_files.read_bytes(path)).hexdigest()
    except OSError:
        return None


def _recorded(folder: Path) -> dict[str, str]:
    """Return the digests that `write_scripts` recorded; empty if the record is missing or damaged."""
    try:
        return dict(json.loads(plain_files.read_text(folder / _RECORD)))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
