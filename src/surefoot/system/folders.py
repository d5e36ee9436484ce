"""The folders that surefoot writes: the kind of a folder, and whether a command may write into it.

Commands call the `require_…` functions before heavy imports, so that a wrong folder is reported at once; the code that
reads the folder calls them again for Python callers. A command may write into an empty folder, and replace its own
earlier result on request; no flag lets it overwrite or remove a file that surefoot did not write. Run folders, which
can be resumed, have their own rules (`surefoot.runs.run_folder`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.system import plain_files
from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

PLAN, CONFIG = "plan.json", "config.yaml"  # files of a run; the plan is written first
MANIFEST = "MANIFEST.json"
CERTIFICATE = "export.json"
FAILURE, FAILED_BATCH = "failure.json", "batch.safetensors"
CHECKPOINT = re.compile(r"checkpoint-(\d+)")
AVERAGE = "ema"  # folder in a run or checkpoint of stage ppo: the moving average of the policy
CRITIC_FOLDER = "critic"  # in the same place: the critic
CONVERSION, QUANTISED = "qat.json", "quantised"  # of a run with `precision.qat`: its record, and the converted model


def require_run(folder: Path) -> None:
    """Raises InputError for a folder that is not a run."""
    for name in (PLAN, CONFIG):
        if not (folder / name).is_file():
            raise _wrong(folder, f"is not a run folder: it has no {name}", "name the output folder of a run")


def require_written(folder: Path) -> None:
    """Raises InputError for a folder with nothing to verify."""
    if any((folder / name).is_file() for name in (CERTIFICATE, MANIFEST)) or is_checkpoint(folder):
        return
    if any(CHECKPOINT.fullmatch(entry.name) for entry in folder.iterdir() if entry.is_dir()):
        return
    if is_run(folder):
        what = "is a run that has no checkpoint yet, so there is nothing to verify"
        raise _wrong(folder, what, "if it was killed, the same command with --resume starts at step 0")
    raise _wrong(folder, "is not a run folder, a checkpoint or an export", "name one that surefoot wrote")


def is_checkpoint(folder: Path) -> bool:
    """Whether it is a checkpoint, by its name."""
    return folder.name.startswith("checkpoint-")


def is_run(folder: Path) -> bool:
    """Whether it is a run folder. A failure-STEP folder, which also has plan and config, is not."""
    failure = any((folder / name).is_file() for name in (FAILURE, FAILED_BATCH))
    return not failure and all((folder / name).is_file() for name in (PLAN, CONFIG))


def run_of(folder: Path) -> Path | None:
    """The run that wrote this folder: the folder itself, or the run that contains the checkpoint or average. None if
    surefoot did not write it, or it was moved out of its run."""
    for place in (folder, *folder.resolve().parents):
        if (place / PLAN).is_file():
            return place
        if not is_checkpoint(place.resolve()) and place.resolve().name != AVERAGE:
            break
    return None


def require_failure(folder: Path) -> None:
    """Raises InputError for a folder without a recorded failure."""
    if not folder.is_dir():
        raise _wrong(folder, "is not a folder", "failures are in the run folder, as failure-STEP")
    if not (folder / FAILURE).is_file() and not (folder / FAILED_BATCH).is_file():
        raise _wrong(folder, f"records no failure: it has no {FAILURE}", "name a failure-STEP folder of a run")


def _wrong(folder: Path, what: str, fix: str) -> InputError:
    """The folder is not of the kind that the command needs."""
    return InputError(Fault(str(folder), what, fix, code="SF-USE-FOLDER"))


def _taken(place: object, what: str, fix: str) -> InputError:
    """The command may not write there."""
    return InputError(Fault(str(place), what, fix, code="SF-USE-OUTPUT"))


PICTURE_MARK = b"Software\0surefoot"  # the Software field of surefoot's PNG files


def require_replaceable(
    out: Path, overwrite: bool, mark: str, kind: str, written: Callable[[Any], Iterable[str]]
) -> None:
    """Raises InputError unless `out` is empty or an earlier result that `overwrite` allows to replace.

    mark: the JSON file that identifies such a result.
    kind: its name for messages, such as export.
    written: returns the names of all other files from the content of `mark`; if it raises KeyError, TypeError or
        AttributeError, `mark` is not from surefoot.
    """
    if out.is_file():
        raise _taken(out, "is a file", "choose another folder with --out")
    if not out.is_dir() or not any(out.iterdir()):
        return
    try:
        names = {mark, *written(json.loads(plain_files.read_text(out / mark)))}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        what = f"is not empty and holds no {kind}" + ("" if (out / mark).is_file() else f": it has no {mark}")
        raise _taken(out, what, "choose another folder with --out") from None
    require_none_but(out, names)
    if not overwrite:
        raise _taken(out, f"contains an earlier {kind}", "choose another --out, or use --overwrite")


def require_none_but(folder: Path, written: Container[str]) -> None:
    """Raises InputError if a folder to be replaced contains files that surefoot did not write. written: names. Hidden
    files, as left by desktops, are ignored."""
    others = sorted(path.name for path in folder.iterdir() if path.name not in written and path.name[0] != ".")
    if others:
        what = f"contains {first_few(others, 3)}, which surefoot did not write"
        raise _taken(folder, what, "move this away, or choose another folder")


def require_file_name(where: str, name: str) -> None:
    """Raises InputError if `name`, which becomes part of a file name, could lead out of its folder. where: its
    option."""
    if not name.strip(" .") or any(letter in "/\\:" or not letter.isprintable() for letter in name):
        what = f"{name!r} cannot be part of a file's name"
        raise _taken(where, what, "use a word such as dora-r16; --out names the folder")


def require_same_request(
    file: Path, requested: Mapping[str, Any], overwrite: bool, pictures: Sequence[str] = ()
) -> None:
    """Raises InputError rather than replace findings of another request, or files that surefoot did not write.

    file: the findings, which store their request under "asked".
    requested: the request as plain values.
    overwrite: whether findings of another request may be replaced.
    pictures: names of pictures written next to `file`, after it.
    """
    earlier = own_findings(file, "asked", pictures)
    if overwrite or earlier in (None, dict(requested)):
        return
    changed = [key for key in {**earlier, **requested} if earlier.get(key) != requested.get(key)]
    what = f"contains findings of another request (different: {', '.join(changed)})"
    raise _taken(file, what, "choose another --out, or use --overwrite")


def own_findings(file: Path, key: str, pictures: Sequence[str] = ()) -> dict[str, Any] | None:
    """The value of `key` in `file`, which all findings of its kind have; None if there is no file. Raises InputError if
    surefoot did not write it, or if pictures exist without it."""
    if not os.path.lexists(file):
        for name in pictures:
            require_own_picture(file.with_name(name))
        return None
    try:
        return dict(json.loads(plain_files.read_text(file))[key])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise _foreign(file) from None


def require_own_files(file: Path, names: Iterable[str]) -> None:
    """Raises InputError if one of these files beside the findings `file` is not as they say under "files", by SHA-256:
    then it is another's, or somebody has worked on it."""
    written = own_findings(file, "files") or {}
    for other in map(file.with_name, names):
        if os.path.lexists(other) and not _is_as(other, written.get(other.name)):
            raise _foreign(other)


def own_files(file: Path) -> list[Path]:
    """The files beside the findings `file` that are as they say. Removed before other findings are written, they cannot
    be taken for another's beside them, if the process is killed in between."""
    said = {file.with_name(name): sha256 for name, sha256 in (own_findings(file, "files") or {}).items()}
    return [other for other, sha256 in said.items() if os.path.lexists(other) and _is_as(other, sha256)]


def _is_as(file: Path, sha256: str | None) -> bool:
    return sha256 == hashlib.sha256(plain_files.read_bytes(file)).hexdigest()


def require_own_picture(file: Path) -> None:
    """Raises InputError if `file` exists and is not a picture of surefoot."""
    try:
        own = not os.path.lexists(file) or PICTURE_MARK in plain_files.read_bytes(file)
    except OSError:
        own = False
    if not own:
        raise _foreign(file)


def _foreign(file: Path) -> InputError:
    return _taken(file, "was not written by surefoot", "choose another path, or move it away")
