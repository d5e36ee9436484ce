"""A run that publishes the whole model: the chosen checkpoint's adapter merged into its base, as `export --merge` does.

The merge is the same code with the same certificate (export.json); only the place is another: the run folder itself.
The checkpoints keep the adapter, so a run that was killed in here merges again when it is resumed.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from surefoot import durable
from surefoot.models.folder import ADAPTER_CONFIG
from surefoot.models.save import ADAPTER_WEIGHTS
from surefoot.stages.export.files import TOKENIZER_FILES
from surefoot.stages.export.whole import export_model

ADAPTER_FILES = frozenset({ADAPTER_CONFIG, ADAPTER_WEIGHTS})
_STAGING = ".merged"
_OWN = frozenset({"README.md", *TOKENIZER_FILES})  # the run has its own


def publish_merged(run: Path, checkpoint: Path) -> tuple[list[str], tuple[str, ...]]:
    """Put the merged model of `checkpoint` into the run folder. Returns the names of its files, and what is to be said
    of the merge. Raises EnvironmentFault where the merge does not agree with the adapter, or the disk is full."""
    staging = run / _STAGING
    exported = export_model(str(checkpoint), staging, merge=True, modelfile=False, overwrite=True)
    names = sorted(path.name for path in staging.iterdir() if path.is_file() and path.name not in _OWN)
    for name in names:
        durable.copy_file(staging / name, run / name)
    durable.remove(staging)
    return names, exported.cautions


def without_adapter(run: Path, names: Collection[str]) -> list[str]:
    """The names of a checkpoint's files that a run with a merged model has as well; those of the adapter go."""
    for name in ADAPTER_FILES:
        durable.remove(run / name)
    return [name for name in names if name not in ADAPTER_FILES]
