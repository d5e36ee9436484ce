"""Whether the disk has room for what a run will write, said before step 1."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from surefoot.config.schema import RunConfig
from surefoot.families.files import TOKENIZER_FILES
from surefoot.models.facts import facts_of
from surefoot.models.folder import resolve_folder
from surefoot.planning.disk import DiskForecast, disk_forecast, model_bytes
from surefoot.planning.plan import RunPlan
from surefoot.system import durable, hardware
from surefoot.system.errors import EnvironmentFault, Fault
from surefoot.system.retention import kept
from surefoot.system.sizes import size_text

NO_ROOM = "make room, lower checkpoint.keep, or set output to a folder on a larger disk"


def disk_of(config: RunConfig, plan: RunPlan, saves: int | None = None) -> DiskForecast:
    """saves: checkpoints that the run writes, None where nobody knows yet."""
    keep = kept(config.checkpoint.keep)
    best = config.checkpoint.best != "none"
    averaged = config.stage == "ppo" and config.ppo.ema is not None
    base = resolve_folder(config.model.path, config.model.revision, weights=False)
    tokenizer = sum((base / name).stat().st_size for name in TOKENIZER_FILES if (base / name).is_file())
    merged = _merged_bytes(config, base)
    return disk_forecast(plan, keep, best=best, saves=saves, merged=merged, averaged=averaged, tokenizer=tokenizer)


def _merged_bytes(config: RunConfig, base: Path) -> int:
    """Of the model that base and adapter become, as the base is stored; 0 where the adapter is published."""
    if config.adapter is None or config.adapter.publish != "merged":
        return 0
    facts = facts_of(base)
    return model_bytes(facts, facts.stored)


def disk_words(needed: DiskForecast) -> str:
    parts = f"up to {needed.checkpoints} checkpoints of {size_text(needed.checkpoint)}"
    return f"{parts} and a model of {size_text(needed.model)} need {size_text(needed.total)}"


def least_words(needed: DiskForecast) -> str:
    """What a run cannot do without."""
    many = f"{needed.written} checkpoints" if needed.written != 1 else "a checkpoint"
    parts = f"{many} of {size_text(needed.checkpoint)} and then a model of {size_text(needed.model)}"
    return f"{parts} need at least {size_text(needed.least)}"


def free_space(folder: Path) -> tuple[Path, int]:
    """The nearest folder that exists, and bytes free on its disk."""
    place = durable.nearest_existing(folder)
    return place, hardware.free_disk(place)


def check_disk(folder: Path, needed: DiskForecast, *, resumed: bool = False) -> Iterator[str]:
    """A caution where not everything that may lie there has room. Raises EnvironmentFault where what the run surely
    writes has none. resumed: the older checkpoints are there already, and make room for the next."""
    needed = needed.further if resumed else needed
    place, free = free_space(folder)
    if free < needed.least:
        raise EnvironmentFault(
            Fault(str(place), f"{size_text(free)} are free; {least_words(needed)}", NO_ROOM, code="SF-DISK-FULL")
        )
    if free < needed.total:
        yield f"{size_text(free)} are free at {place}; {disk_words(needed)}: make room, or lower checkpoint.keep"
