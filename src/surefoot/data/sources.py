"""Where examples come from: files, folders, described folders, hub data sets. What is opened here is read in `rows`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
