"""Where an export may be written. Needs no torch, so that a wrong place is answered at once."""

from __future__ import annotations

from pathlib import Path

from surefoot.errors import Fault, InputError
from surefoot.report.export_card import CERTIFICATE


def check_out(out: Path, overwrite: bool) -> None:
    """Raises InputError where `out` holds anything but an export that may be replaced."""
    if not out.exists():
        return
    if not out.is_dir():
        raise InputError(Fault(str(out), "is a file", "choose another folder with --out"))
    if not any(out.iterdir()):
        return
    if not (out / CERTIFICATE).is_file():
        what = f"is not empty and no export: it has no {CERTIFICATE}"
        raise InputError(Fault(str(out), what, "choose another --out"))
    if not overwrite:
        raise InputError(Fault(str(out), "holds an export already", "choose another --out, or give --overwrite"))
