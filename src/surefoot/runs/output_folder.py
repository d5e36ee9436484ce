"""Checks that need no torch: may a run use its output folder, and is there enough disk space?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from surefoot.config.dump import shown
from surefoot.config.load import plain_config
from surefoot.config.resume_policy import Change, diff_configs
from surefoot.config.saved_shape import with_shape_of_then
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import read_yaml
from surefoot.data.sources.dataset_info import read_description
from surefoot.families.files import TOKENIZER_FILES, read_json
from surefoot.families.templates import is_jinja, is_users_own
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.ahead import draws_alongside
from surefoot.planning.disk import DiskForecast, checkpoints_kept, disk_forecast, model_bytes
from surefoot.planning.plan import RunPlan
from surefoot.system import durable, hardware
from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.folders import CHECKPOINT, CONFIG, MANIFEST, PLAN
from surefoot.system.messages import size_text

Mode = Literal["new", "resume", "overwrite"]
_OF_LAUNCHERS = ("training.log",)  # written by launch scripts such as DeepSpeed-Chat's before the run starts


def require_free(config: RunConfig, mode: Mode) -> bool:
    """Return whether the folder has content. Raises InputError if the run may neither keep nor replace it,
    EnvironmentFault if nothing can be written."""
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
    """Whether a new run may use the folder without a flag: it does not exist or contains nothing of the user's."""
    return not folder.exists() or (
        folder.is_dir() and all(durable.is_temporary(path) or path.name in _OF_LAUNCHERS for path in folder.iterdir())
    )


def refuse_occupied(folder: Path, mode: Mode) -> None:
    """Raises InputError if the folder is no run's, or a new run would lose what one has saved there. Where nothing was
    saved, as after an error in the first steps, the same command begins anew."""
    if mode == "new" and _is_run_folder(folder) and _has_saved(folder):
        fix = "continue it with --resume, replace it with --overwrite"
        raise InputError(Fault("output", f"{folder} is not empty", fix, code="SF-USE-OUTPUT"))
    if not _is_run_folder(folder):
        what = f"{folder} holds files but no surefoot run: no checkpoint, and no {PLAN} that can be read"
        fix = "name another folder" if mode == "new" else "nothing in it was changed; check the path"
        raise InputError(Fault("output", what, fix, code="SF-USE-OUTPUT"))


def _refuse_own_inputs(config: RunConfig, folder: Path) -> None:
    inputs = [("model.path", config.model.path)]
    if config.adapter is not None and config.adapter.initial is not None:
        inputs.append(("adapter.initial", config.adapter.initial))
    if is_users_own(config.data.template) and not is_jinja(config.data.template):
        inputs.append(("data.template", config.data.template))
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        for source in sources if isinstance(sources, tuple) else ():
            inputs += [(key, source.path), *((key, path) for path in _described(source.path))]
    faults = [
        Fault(
            key,
            f"{path} is in {folder}, which --overwrite replaces",
            "move it, or name another output",
            code="SF-USE-OUTPUT",
        )
        for key, path in inputs
        if Path(path).exists() and Path(path).resolve().is_relative_to(folder.resolve())
    ]
    if faults:
        raise InputError(faults)


def _described(path: str) -> list[str]:
    """Files named in a folder's dataset_info.json; they may be in subfolders."""
    entries = read_description(Path(path), path) or {}
    names = [entry.get("file_name") for entry in entries.values()]
    return [str(Path(path) / name) for name in names if isinstance(name, str)]


def _is_run_folder(folder: Path) -> bool:
    """Whether the folder has files that only surefoot writes; others may also have a config.yaml or checkpoint-7."""
    try:
        if "plan" in read_json(folder / PLAN):
            return True
    except InputError:
        pass
    return has_checkpoint(folder)


def _has_saved(folder: Path) -> bool:
    """Whether the run has a checkpoint, intact or not, or has published a model."""
    return has_checkpoint(folder) or (folder / MANIFEST).exists()


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint, intact or not."""
    return any((path / MANIFEST).is_file() for path in folder.iterdir() if CHECKPOINT.fullmatch(path.name))


def changes_since(config: RunConfig, folder: Path) -> list[Change]:
    """The changes of the config since the run in the folder was started. Raises InputError for those that no resumed
    run may have."""
    with readable(folder / CONFIG):
        saved = with_defaults(with_shape_of_then(read_yaml(folder / CONFIG).data))
    changes = diff_configs(saved, plain_config(config))
    if refused := [change for change in changes if change.policy == "refused"]:
        raise InputError([_refusal(change, folder) for change in refused])
    return changes


def with_defaults(saved: dict[str, Any]) -> dict[str, Any]:
    """Add defaults of keys that did not exist when the config was saved. An invalid config is returned unchanged."""
    try:
        return plain_config(RunConfig.model_validate(saved))
    except ValueError:
        return saved


def _refusal(change: Change, folder: Path) -> Fault:
    what = f"was {shown(change.old)} in {folder}, is {shown(change.new)} now: {change.why}"
    return Fault(change.key, what, "change it back, or start another run", code="SF-RESUME-CHANGED")


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn an unreadable record into one fault that names the file."""
    try:
        yield
    except InputError as error:
        first = error.faults[0]
        where = first.where if first.where.startswith(str(path)) else f"{path}: {first.where}"
        raise InputError(Fault(where, first.what, "restore it to resume this run", first.code)) from None


NO_ROOM = "make room, lower checkpoint.keep, or set output to a folder on a larger disk"


def disk_of(config: RunConfig, plan: RunPlan, saves: int | None = None) -> DiskForecast:
    """Forecast the run's disk use. saves: number of checkpoints; None if not known yet."""
    keep = checkpoints_kept(config.checkpoint.keep)
    best = config.checkpoint.best != "none"
    averaged = config.method.critic and config.ppo.ema is not None
    base = resolve_folder(config.model.path, config.model.revision, weights=False)
    tokenizer = sum((base / name).stat().st_size for name in TOKENIZER_FILES if (base / name).is_file())
    merged = _merged_bytes(config, base)
    found = disk_forecast(plan, keep, best=best, saves=saves, merged=merged, averaged=averaged, tokenizer=tokenizer)
    drawing = config.method.rollouts and config.grpo.ahead and draws_alongside(config.grpo.engine, plan.parallel)
    # The weights that draw beside an update.
    return replace(found, checkpoint=found.checkpoint + 4 * plan.trainable) if drawing else found


def _merged_bytes(config: RunConfig, base: Path) -> int:
    """Bytes of the merged model in the base's dtype; 0 if the adapter itself is published."""
    if config.adapter is None or config.adapter.publish != "merged":
        return 0
    facts = facts_of(base)
    return model_bytes(facts, facts.stored)


def disk_words(needed: DiskForecast) -> str:
    parts = f"up to {needed.checkpoints} checkpoints of {size_text(needed.checkpoint)}"
    return f"{parts} and a model of {size_text(needed.model)} need {size_text(needed.total)}"


def least_words(needed: DiskForecast) -> str:
    """Describe the minimum that a run needs."""
    many = f"{needed.written} checkpoints" if needed.written != 1 else "a checkpoint"
    parts = f"{many} of {size_text(needed.checkpoint)} and then a model of {size_text(needed.model)}"
    return f"{parts} need at least {size_text(needed.least)}"


def free_space(folder: Path) -> tuple[Path, int]:
    """Return the nearest existing folder and the free bytes on its disk."""
    place = durable.nearest_existing(folder)
    return place, hardware.free_disk(place)


def check_disk(folder: Path, needed: DiskForecast, *, resumed: bool = False) -> Iterator[str]:
    """Yield a warning if there is not enough space for everything the run may write. Raises EnvironmentFault if there
    is not enough for what it certainly writes. resumed: older checkpoints exist already and will be deleted for new
    ones."""
    needed = needed.further if resumed else needed
    place, free = free_space(folder)
    if free < needed.least:
        raise EnvironmentFault(
            Fault(str(place), f"{size_text(free)} are free; {least_words(needed)}", NO_ROOM, code="SF-DISK-FULL")
        )
    if free < needed.total:
        yield f"{size_text(free)} are free at {place}; {disk_words(needed)}: make room, or lower checkpoint.keep"
