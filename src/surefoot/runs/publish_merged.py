"""A run that publishes the whole model: the chosen checkpoint's adapter merged into its base, as `export --merge` does;
the moving average of stage ppo likewise.

The merge is the same code with the same certificate (export.json); only the place is another: the run folder itself.
The checkpoints keep the adapter, so a run that was killed in here merges again when it is resumed.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path, PurePosixPath

from surefoot.families.files import TOKENIZER_FILES
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.runs.export.whole import export_model
from surefoot.system import durable
from surefoot.system.made_folders import AVERAGE, CERTIFICATE

ADAPTER_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_WEIGHTS})
_POLICIES = ("", AVERAGE)  # where a checkpoint has one; a critic stays what it is to PPO, an adapter on the trunk
_STAGING = ".merged"
_OWN = frozenset({"README.md", *TOKENIZER_FILES})  # the run has its own


def publish_merged(run: Path, checkpoint: Path) -> tuple[list[str], tuple[str, ...]]:
    """Put the merged models of `checkpoint` into the run folder. Returns the names of their files, and what is to be
    said of the merges. Raises EnvironmentFault where one does not agree with its adapter, or the disk is full."""
    names: list[str] = []
    cautions: list[str] = []
    staging = run / _STAGING
    for place in _POLICIES:
        if not (checkpoint / place / ADAPTER_CONFIG).is_file():
            continue
        exported = export_model(str(checkpoint / place), staging, merge=True, modelfile=False, overwrite=True)
        own = sorted(path.name for path in staging.iterdir() if path.is_file() and path.name not in _OWN)
        durable.make_folders(run / place)
        for name in own:
            durable.copy_file(staging / name, run / place / name)
        outputs = {name: entry for name, entry in exported.record["outputs"].items() if name in own}
        durable.write_json(run / place / CERTIFICATE, {**exported.record, "outputs": outputs})
        durable.remove(staging)
        names += [str(PurePosixPath(place, name)) for name in own]
        cautions += exported.cautions
    return names, tuple(dict.fromkeys(cautions))


def without_adapter(run: Path, names: Collection[str]) -> list[str]:
    """The names of a checkpoint's files that a run with merged models has as well; those of their adapters go."""
    places = [place for place in _POLICIES if (run / place).is_dir()]
    adapters = {str(PurePosixPath(place, name)) for place in places for name in ADAPTER_FILES}
    for name in adapters:
        durable.remove(run / name)
    return [name for name in names if name not in adapters]
