"""Where examples come from: files, folders, described folders, hub data sets.

`open_sources` finds what a path means and hashes it; nothing is parsed yet. `surefoot.data.rows.parse_rows` does that,
one source after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from surefoot.data.files import open_file
from surefoot.data.rows import Source
from surefoot.errors import Fault, InputError


@dataclass(frozen=True)
class SourceSpec:
    """One entry of data.train or data.eval, as plain values.

    path: file, folder or hub id. format: auto or a layout's name. columns: field of the layout -> the file's own name.
    name: entry of the folder's dataset_info.json. subset, split, revision, streaming: of a hub data set.
    weight, epochs: its part in a mixture, see `surefoot.data.order`.
    """

    path: str
    format: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    name: str | None = None
    subset: str | None = None
    split: str = "train"
    revision: str | None = None
    streaming: bool = False
    max_samples: int | None = None
    weight: float | None = None
    epochs: float | None = None


def open_sources(spec: SourceSpec) -> tuple[Source, ...]:
    """The files that a spec means, in a stable order, at least one; each hashed and none parsed.

    max_samples is the caller's to apply, over the sources in their order; only a stream ends by itself after so many.
    Raises InputError for what does not exist or does not fit together, EnvironmentFault for what cannot be reached.
    """
    if Path(spec.path).is_dir():
        raise InputError(Fault(spec.path, "is a folder, not a file"))
    source = open_file(spec.path)
    return (replace(source, format=spec.format, columns=spec.columns),)
