"""Whether a run may take its output folder, as far as the folder itself tells. No torch: it is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from surefoot.config.schema import RunConfig
from surefoot.data.described import read_description
from surefoot.families.files import read_json
from surefoot.families.templates import is_file
from surefoot.system import durable
from surefoot.system.errors import Fault, InputError
from surefoot.system.made_folders import CHECKPOINT, MANIFEST, PLAN

Mode = Literal["new", "resume", "overwrite"]
_OF_LAUNCHERS = ("training.log",)  # what launch scripts such as DeepSpeed-Chat's write into before anything has started


def require_free(config: RunConfig, mode: Mode) -> bool:
    """Whether something is in the folder already. Raises InputError where that may not stay or go, EnvironmentFault
    where nothing can be written."""
    folder = Path(config.output)
    if folder.exists() and not folder.is_dir():
        raise InputError(Fault("output", f"{folder} is a file", "name a folder", code="SF-USE-OUTPUT"))
    if occupied := not is_free(folder):
        refuse_occupied(folder, mode)
        if mode == "overwrite":
            _refuse_own_inputs(config, folder)
    durable.require_writable(folder)
    return occupied


def is_free(folder: Path) -> bool:
    """Whether a new run takes it without a word: there is nothing, or a folder that nobody has put anything into."""
    return not folder.exists() or (
        folder.is_dir() and all(durable.is_temporary(path) or path.name in _OF_LAUNCHERS for path in folder.iterdir())
    )


def refuse_occupied(folder: Path, mode: Mode) -> None:
    if mode == "new":
        fix = "continue it with --resume, replace it with --overwrite"
        raise InputError(Fault("output", f"{folder} is not empty", fix, code="SF-USE-OUTPUT"))
    if not _is_run_folder(folder):
        what = f"{folder} holds files but no surefoot run: no checkpoint, and no {PLAN} that can be read"
        raise InputError(Fault("output", what, "nothing in it was touched; check the path", code="SF-USE-OUTPUT"))


def _refuse_own_inputs(config: RunConfig, folder: Path) -> None:
    inputs = [("model.path", config.model.path)]
    if is_file(config.data.template):
        inputs.append(("data.template", config.data.template))
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for source in sources if isinstance(sources, tuple) else ():
            inputs += [(key, source.path), *((key, path) for path in _described(source.path))]
    faults = [
        Fault(
            key,
            f"{path} lies in {folder}, which --overwrite replaces",
            "move it, or name another output",
            code="SF-USE-OUTPUT",
        )
        for key, path in inputs
        if Path(path).exists() and Path(path).resolve().is_relative_to(folder.resolve())
    ]
    if faults:
        raise InputError(faults)


def _described(path: str) -> list[str]:
    """The files that a folder's dataset_info.json names; they may lie in folders below it."""
    entries = read_description(Path(path), path) or {}
    names = [entry.get("file_name") for entry in entries.values()]
    return [str(Path(path) / name) for name in names if isinstance(name, str)]


def _is_run_folder(folder: Path) -> bool:
    """By what only surefoot writes: a config.yaml or a checkpoint-7 may be anyone's."""
    try:
        if "plan" in read_json(folder / PLAN):
            return True
    except InputError:
        pass
    return any((path / MANIFEST).is_file() for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))
