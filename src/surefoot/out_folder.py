"""Whether a command may write into a folder: into an empty one, and over an earlier result of its own where asked to.

Needs no torch, so that a wrong place is answered at once. A run's folder, which can also be continued, has rules of its
own (`surefoot.stages.run_folder`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from surefoot import plain_files
from surefoot.errors import Fault, InputError


def require_replaceable(
    out: Path, overwrite: bool, mark: str, kind: str, is_ours: Callable[[Path], bool] | None = None
) -> None:
    """Raises InputError where `out` holds anything but an earlier result that `overwrite` allows to replace.

    mark: the file that tells such a result. kind: what it is called, as export. is_ours: for results that
    `mark` alone does not tell.
    """
    if out.is_file():
        raise InputError(Fault(str(out), "is a file", "choose another folder with --out"))
    if not out.is_dir() or not any(out.iterdir()):
        return
    if not (is_ours(out) if is_ours else (out / mark).is_file()):
        what = f"is not empty and no {kind}" + ("" if (out / mark).is_file() else f": it has no {mark}")
        raise InputError(Fault(str(out), what, "choose another folder with --out"))
    if not overwrite:
        raise InputError(Fault(str(out), f"holds an earlier {kind}", "choose another --out, or give --overwrite"))


def require_file_name(where: str, name: str) -> None:
    """Raises InputError where `name`, which becomes part of a file's name, could lead out of its folder. where: what it
    was given by."""
    if not name.strip(" .") or any(letter in "/\\:" or not letter.isprintable() for letter in name):
        what = f"{name!r} cannot be part of a file's name"
        raise InputError(Fault(where, what, "use a word such as dora-r16; the folder is named by --out"))


def require_same_request(file: Path, asked: Mapping[str, Any], overwrite: bool) -> None:
    """Raises InputError where `file` holds findings on another request than `asked`, unless they may go.

    Findings keep their request under "asked". asked: plain values.
    """
    if overwrite or not file.is_file():
        return
    try:
        content = json.loads(plain_files.read_text(file))
        earlier = content.get("asked") if isinstance(content, dict) else None
    except (OSError, ValueError, RecursionError):
        earlier = None
    if earlier == dict(asked):
        return
    what = "holds other findings"
    if isinstance(earlier, dict):
        changed = [key for key in {**earlier, **asked} if earlier.get(key) != asked.get(key)]
        what += f" (not the same: {', '.join(changed)})"
    raise InputError(Fault(str(file), what, "choose another --out, or give --overwrite"))
