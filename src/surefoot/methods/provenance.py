"""Check whether an opened folder is what a run left: finished, unchanged, and over the base it was trained on.

A folder without weights cannot be opened, so that is an error, and so is a base with another vocabulary (`open_model`).
Everything else is a caution: an adapter over another base can be an experiment, and a user may edit files on purpose.
"""

from __future__ import annotations

import re
from pathlib import Path

from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import read_yaml
from surefoot.families.files import read_json
from surefoot.models.folder import base_fingerprint, resolve_folder
from surefoot.planning.plan import RunPlan, plan_from_json
from surefoot.system.errors import Fault, InputError, IntegrityError, SurefootError
from surefoot.system.folders import CONFIG, PLAN, run_of

_CHECKED = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})  # file types that opening may read
_HASHED_UP_TO = 500_000_000  # bytes; about half a second. Of larger files only the size is checked


def require_weights(folder: Path, path: str) -> None:
    """Raise InputError if a run has published no model yet. Needs no torch.

    path: as given by the user.
    """
    published = any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
    if published or not (folder / PLAN).is_file():
        return
    newest = _newest_checkpoint(folder)
    fix = f"use {path.rstrip('/')}/{newest.name}" if newest else "it has no checkpoint yet; continue it with --resume"
    raise InputError(Fault(path, "is not finished", fix, code="SF-USE-FOLDER"))


def recorded_base(path: str, folder: Path, base: str, revision: str | None) -> Path:
    """Return the folder of an adapter's base. A relative path is resolved against the working folder and the folders
    above the run, because it was written in the folder where training ran. A surefoot run on a hub model records the
    commit; without one the base was a folder, and must not be replaced by a hub model of the same name.

    path: the adapter's path as given by the user.
    folder: the adapter's folder.
    base, revision: as recorded in the adapter.
    """
    try:
        if not base:
            raise InputError("no base is recorded")
        for start in (Path(), *folder.resolve().parents):
            if (start / base / "config.json").is_file():
                return start / base
        if revision is None and saved_plan(folder) is not None:
            raise InputError(f"it was the folder {base}, which is neither here nor in a folder above the run")
        return resolve_folder(base, revision, weights=True)
    except SurefootError as error:
        what = f"its base model {base} cannot be opened: {error.faults[0]}"
        fault = Fault(
            str(folder / "adapter_config.json"), what, f"or name both: BASE --adapter {path}", code="SF-ADAPTER-FIT"
        )
        raise type(error)(fault) from error


def saved_plan(folder: Path) -> RunPlan | None:
    """Return the plan of the run that wrote this folder; None if there is none."""
    run = run_of(folder)
    return None if run is None else plan_from_json(read_json(run / PLAN).get("plan", {}))


def saved_config(folder: Path) -> RunConfig | None:
    """Return the config of that run; None also if another version of surefoot wrote it."""
    run = run_of(folder)
    if run is None or not (run / CONFIG).is_file():
        return None
    try:
        return RunConfig.model_validate(read_yaml(run / CONFIG).data)
    except ValueError:
        return None


def cautions_about(trained: Path, base: Path) -> tuple[str, ...]:
    """Return what differs from what the run wrote. Folders that surefoot did not write cannot be checked.

    trained: a run folder, checkpoint or adapter.
    base: the model under it, or the same folder.
    """
    elsewhere = other_base_caution(str(trained), str(base)) if over_another_base(trained, base) else ""
    return (*([elsewhere] if elsewhere else ()), *changed_files(trained))


def other_base_caution(trained: str, base: str) -> str:
    """Caution that an adapter is opened over other weights than it was trained over.

    trained, base: names for the message.
    """
    return f"{trained} was trained over other weights than {base} has: answers may make no sense"


def over_another_base(trained: Path, base: Path) -> bool:
    """Whether the manifest of `trained` records another base; False without a readable manifest."""
    from surefoot.training.manifest import MANIFEST, read_manifest

    if base == trained or not (trained / MANIFEST).is_file():
        return False
    try:
        then = read_manifest(trained)["identity"].get("base")
    except IntegrityError:
        return False
    return then is not None and then != base_fingerprint(base)


def changed_files(trained: Path) -> tuple[str, ...]:
    """Return a sentence for each changed file, or if there is nothing to compare with."""
    from surefoot.training.manifest import MANIFEST, check_files

    if not (trained / MANIFEST).is_file():
        if not (trained / PLAN).is_file():
            return ()
        return (f"{trained} is not finished, so there is nothing to check its files against",)
    try:
        checks = check_files(trained, hashed_up_to=_HASHED_UP_TO)
    except IntegrityError as error:
        return tuple(map(str, error.faults))
    return tuple(str(check.fault) for check in checks if check.fault and Path(check.name).suffix in _CHECKED)


def _newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint."""
    found = [path.parent for path in folder.glob("checkpoint-*/MANIFEST.json")]
    steps = {int(match[1]): path for path in found if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))}
    return steps[max(steps)] if steps else None
