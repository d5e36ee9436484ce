"""Scripts under the names that existing launch scripts call, each a few lines onto surefoot.

They lie in `scripts/` as they are used: `source compat/activate` in the repository, or `surefoot compat DIR` for users
of the installed package. See docs/compat.md.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from surefoot import durable
from surefoot.errors import Fault, InputError

_ANY_PYTHON = b"#!/usr/bin/env python3\n"
_LONGEST = 127  # bytes of a first line, on the systems that read least


def write_scripts(folder: Path, *, overwrite: bool) -> list[str]:
    """Write the scripts into `folder`, to be started by the Python that has surefoot, and return their names. Raises
    InputError where another file of one of these names stands there and `overwrite` is off, and for a run's folder;
    EnvironmentFault where nothing can be written. Then nothing is."""
    if any((folder / name).is_file() for name in ("plan.json", "MANIFEST.json")):
        raise InputError(Fault(str(folder), "is the folder of a run", "name another folder, such as old-names"))
    durable.require_writable(folder)
    with resources.as_file(resources.files(__name__) / "scripts") as scripts:
        files = {name: _with_python((scripts / name).read_bytes(), sys.executable) for name in _files(scripts)}
        changed = [name for name, ours in files.items() if _is_other(folder / name, ours)]
        if changed and not overwrite:
            what = f"has other files of these names: {', '.join(changed[:3])}{', …' if len(changed) > 3 else ''}"
            raise InputError(Fault(str(folder), what, "name another folder, or add --overwrite"))
        for name, ours in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            durable.write_bytes(folder / name, ours)
            shutil.copymode(scripts / name, folder / name)
    return list(files)


def _files(scripts: Path) -> Iterator[str]:
    for path in sorted(scripts.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path.relative_to(scripts).as_posix()


def _with_python(script: bytes, python: str) -> bytes:
    """Outside of its environment, `python3` would not find surefoot. Systems read so much of a first line and know no
    quotes: a longer path, or one with a blank, goes through sh, in lines that Python reads as a text."""
    if not script.startswith(_ANY_PYTHON) or not python:
        return script
    first = f"#!{python}\n"
    if len(first.encode()) > _LONGEST or any(letter.isspace() for letter in python):
        first = f"#!/bin/sh\n'''exec' {shlex.quote(python)} \"$0\" \"$@\"\n' '''\n"
    return first.encode() + script.removeprefix(_ANY_PYTHON)


def _is_other(path: Path, ours: bytes) -> bool:
    return path.exists() and (not path.is_file() or path.read_bytes() != ours)
