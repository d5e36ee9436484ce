"""The folders that surefoot writes: which kind a folder is, and whether a command may write into it.

Commands call the `require_…` functions before they import anything heavy, so that a wrong folder is answered at once;
the code that reads the folder calls them again for callers from Python. A command may write into an empty folder, and
over an earlier result of its own where asked to; no flag lets it overwrite or remove a file that surefoot did not
write. A run's folder, which can also be continued, has rules of its own (`surefoot.runs.run_folder`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.system import plain_files
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

PLAN, CONFIG = "plan.json", "config.yaml"  # of a run; the plan is written first
MANIFEST = "MANIFEST.json"
CERTIFICATE = "export.json"
FAILURE, FAILED_BATCH = "failure.json", "batch.safetensors"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
AVERAGE = "ema"  # in a run or a checkpoint of stage ppo: the moving average of the policy
CRITIC_FOLDER = "critic"  # there as well


def require_run(folder: Path) -> None:
    """Raises InputError for a folder that is no run."""
    for name in (PLAN, CONFIG):
        if not (folder / name).is_file():
            raise _wrong(folder, f"is not a run folder: it has no {name}", "name the output of a run")


def require_written(folder: Path) -> None:
    """Raises InputError for a folder without anything that could be verified."""
    if any((folder / name).is_file() for name in (CERTIFICATE, MANIFEST)) or is_checkpoint(folder):
        return
    if any(CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir()):
        return
    if is_run(folder):
        what = "is a run that has no checkpoint yet, so there is nothing to verify"
        raise _wrong(folder, what, "where it died, the same command with --resume starts at step 0")
    raise _wrong(folder, "is neither a run folder nor a checkpoint nor an export", "name one that surefoot wrote")


def is_checkpoint(folder: Path) -> bool:
    """By its name."""
    return folder.name.startswith("checkpoint-")


def is_run(folder: Path) -> bool:
    """A failure-STEP, which has plan and config as well, is none."""
    failure = any((folder / name).is_file() for name in (FAILURE, FAILED_BATCH))
    return not failure and all((folder / name).is_file() for name in (PLAN, CONFIG))


def run_of(folder: Path) -> Path | None:
    """The run that wrote this folder: itself, or the one in which it lies as a checkpoint or as an average. None where
    surefoot did not write it, or where it was taken out of its run."""
    for place in (folder, *folder.resolve().parents):
        if (place / PLAN).is_file():
            return place
        if not is_checkpoint(place.resolve()) and place.resolve().name != AVERAGE:
            break
    return None


def require_failure(folder: Path) -> None:
    """Raises InputError for a folder that records no failure."""
    if not folder.is_dir():
        raise _wrong(folder, "is not a folder", "a failure lies in the run folder, as failure-STEP")
    if not (folder / FAILURE).is_file() and not (folder / FAILED_BATCH).is_file():
        raise _wrong(folder, f"records no failure: it has no {FAILURE}", "give the folder failure-STEP of a run")


def _wrong(folder: Path, what: str, fix: str) -> InputError:
    """The folder is not what the command works on."""
    return InputError(Fault(str(folder), what, fix, code="SF-USE-FOLDER"))


def _taken(place: object, what: str, fix: str) -> InputError:
    """A command may not write there."""
    return InputError(Fault(str(place), what, fix, code="SF-USE-OUTPUT"))


PICTURE_MARK = b"Software\0surefoot"  # in every PNG file of surefoot, as the format names its author


def require_replaceable(
    out: Path, overwrite: bool, mark: str, kind: str, written: Callable[[Any], Iterable[str]]
) -> None:
    """Raises InputError where `out` holds anything but an earlier result that `overwrite` allows to replace.

    mark: the JSON file that tells such a result.
    kind: what it is called, as export.
    written: the names of all other files of the result from the content of `mark`; a KeyError, TypeError or
        AttributeError of it says that it is none.
    """
    if out.is_file():
        raise _taken(out, "is a file", "choose another folder with --out")
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        names = {mark, *written(json.loads(plain_files.read_text(out / mark)))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = f"is not empty and no {kind}" + ("" if (out / mark).is_file() else f": it has no {mark}")
        raise _taken(out, what, "choose another folder with --out") from None
    require_none_but(out, names)
    if not overwrite:
        raise _taken(out, f"holds an earlier {kind}", "choose another --out, or give --overwrite")


def require_none_but(folder: Path, written: Container[str]) -> None:
    """Raises InputError where a folder that is to be replaced holds more than what surefoot wrote. written: names.
    Hidden files, as desktops leave them, are nobody's."""
    others = sorted(path.name for path in folder.iterdir() if path.name not in written and path.name[0] != ".")
    if others:
        what = f"holds {first_few(others, 3)}, which surefoot did not write there"
        raise _taken(folder, what, "move it away, or choose another folder")


def require_file_name(where: str, name: str) -> None:
    """Raises InputError where `name`, which becomes part of a file's name, could lead out of its folder. where: what it
    was given by."""
    if not name.strip(" .") or any(letter in "/\\:" or not letter.isprintable() for letter in name):
        what = f"{name!r} cannot be part of a file's name"
        raise _taken(where, what, "use a word such as dora-r16; the folder is named by --out")


def require_same_request(
    file: Path, requested: Mapping[str, Any], overwrite: bool, pictures: Sequence[str] = ()
) -> None:
    """Refuse to replace findings on another request, and files that surefoot did not write, by an InputError.

    file: the findings, which keep their request under "asked".
    requested: the request, plain values.
    overwrite: whether findings on another request may go.
    pictures: names of what is drawn beside `file`, after it.
    """
    earlier = own_findings(file, "asked", pictures)
    if overwrite or earlier in (None, dict(requested)):
        return
    changed = [key for key in {**earlier, **requested} if earlier.get(key) != requested.get(key)]
    what = f"holds other findings (not the same: {', '.join(changed)})"
    raise _taken(file, what, "choose another --out, or give --overwrite")


def own_findings(file: Path, key: str, pictures: Sequence[str] = ()) -> dict[str, Any] | None:
    """What `file` holds under `key`, as all findings of its kind do; None where it is not there. Raises InputError
    where surefoot did not write it, or not the pictures that are there without it."""
    if not os.path.lexists(file):
        for name in pictures:
            require_own_picture(file.with_name(name))
        return None
    try:
        return dict(json.loads(plain_files.read_text(file))[key])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise _foreign(file) from None


def require_own_picture(file: Path) -> None:
    """Raises InputError where `file` is there and no picture that says it is surefoot's."""
    try:
        own = not os.path.lexists(file) or PICTURE_MARK in plain_files.read_bytes(file)
    except OSError:
        own = False
    if not own:
        raise _foreign(file)


def _foreign(file: Path) -> InputError:
    return _taken(file, "was not written by surefoot", "name another place, or move it away")
