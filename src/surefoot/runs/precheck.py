"""Checks of a run that need no torch, which takes seconds to import: the folder, conflicts of the config, the model's
config and weight headers, disk space, the first record of each data source.

    commits = check_before_torch(config, mode)
    from surefoot.runs.run import train_run

The run reuses the commits instead of asking the hub again, and repeats the other checks with the same functions in some
milliseconds.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from surefoot.config.schema import RunConfig
from surefoot.data.formats import retag, scan_format
from surefoot.data.sources.resolve import files_of, first_row
from surefoot.methods.sources import evaluated_specs, trained_specs
from surefoot.models.folder import stored_tensors
from surefoot.report.trackers.adapters import require_trackers
from surefoot.runs.make_plan import make_plan
from surefoot.runs.output_folder import Mode, changes_since, check_disk, disk_of, has_checkpoint, require_free
from surefoot.runs.requirements import raised_together
from surefoot.runs.revisions import Commits, hub_data_name, pin
from surefoot.system import hardware
from surefoot.system.errors import Fault, InputError
from surefoot.system.locations import looks_local

_LARGE = 64 << 20  # bytes of described data that are not looked into here: they are read whole, which takes time
_OWN = "custom"  # the format of records that a Python caller's function reads


def check_before_torch(config: RunConfig, mode: Mode, *, dry_run: bool = False) -> Commits | None:
    """Raise what `train_run` would raise and torch is not needed for.

    dry_run: as of its options; it is told of an occupied folder at its end.

    Returns the commits of the names on the hub, None if they were not looked up.
    """
    folder = Path(config.output)
    refused: tuple[Fault, ...] = ()
    try:
        if require_free(config, mode) and mode == "resume":
            if has_checkpoint(folder):
                changes_since(config, folder)
            return None  # the recorded plan decides, and the run may be finished
    except InputError as error:
        if config.metrics.names:  # which exist is known only with torch, and all faults are reported together
            return None
        refused = error.faults
    commits = _check_plan(config, folder, refused, alone=not (dry_run and mode == "new"))
    kind, data = config.method.records, config.data
    for sources, specs in ((data.train, trained_specs(config)), (data.eval, evaluated_specs(config))):
        for source, spec in zip(sources if isinstance(sources, tuple) else (), specs, strict=True):
            if files_of(spec) or (hub_data_name(source) is None and _size(Path(source.path)) <= _LARGE):
                found, row = first_row(replace(spec, kind=kind))
                rows, texts = retag([row], found.tags), config.method.plain_texts
                if not found.columns and found.format != _OWN:  # a named column may stand in later records alone
                    scan = scan_format(kind, found.format, rows, found.name, texts=texts)
                    scan.refuse_misspelt((*found.constant, *found.compose))
    return commits


def _check_plan(config: RunConfig, folder: Path, refused: tuple[Fault, ...], *, alone: bool) -> Commits:
    """Make the draft plan; return the commits of the names on the hub.

    refused: faults of the run folder, raised together with those of the config.
    alone: whether they are raised if the config has none.
    """
    with raised_together(refused, alone=alone):
        require_trackers(config.report_to)
        pinned, commits = pin(config, {})
        # PPO's models are looked at with torch. Without it nothing is known of a GPU but that there is one.
        draft = None if config.method.rollouts else make_plan(pinned, hardware=hardware.glance(), measure=False)
    if looks_local(config.model.path) and config.model.weights == "own":
        stored_tensors(Path(config.model.path))
    if draft is not None and looks_local(config.model.path):
        list(check_disk(folder, disk_of(pinned, draft)))
    return commits


def _size(path: Path) -> int:
    """Bytes of a file, or of the files in a folder."""
    files = path.iterdir() if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())
