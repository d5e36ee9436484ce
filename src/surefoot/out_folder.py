"""Whether a command may write into a folder: into an empty one, and over an earlier result of its own where asked to.

Needs no torch, so that a wrong place is answered at once. A run's folder, which can also be continued, has rules of its
own (`surefoot.stages.run_folder`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
