"""Read data sets from the hub: choose the files of the requested subset and split, and download or stream them.

No code of a repository is ever run. Files are chosen by the `configs` of its README, else by folder and file names, as
the hub's own viewer does; an ambiguous choice is an error that lists the options. The revision is resolved to a commit
first, and all files are read at this commit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from surefoot.data.sources.hub_files import Chosen, Splits, choose_files
from surefoot.data.sources.records import Source, open_file
from surefoot.data.sources.tables import read_parquet
from surefoot.data.sources.text import read_line
from surefoot.system.errors import Fault, InputError
from surefoot.system.hub import Repository, bounded_client, fetch, hub_faults, look_up
from surefoot.system.locations import data_kind

_README = "README.md"
_BLOCK = 2**20  # bytes per request
_STREAMED = (".jsonl", ".ndjson", ".parquet")


@dataclass(frozen=True)
class HubData:
    """A request for a data set.

    name: org/name.
    folder: folder of the repository; None for all of it.
    """

    name: str
    subset: str | None
    split: str | Splits
    revision: str | None
    folder: str | None = None


def open_hub(data: HubData) -> tuple[Source, ...]:
    """Download a data set's files (or find them in the cache) and hash them. Returns them sorted by name.

    Raises InputError for an unknown data set, revision, subset or split; EnvironmentFault if the hub cannot be reached
    or denies access.
    """
    repository, chosen = _choose(data)
    folder = fetch(repository, chosen.files)
    return tuple(_of_hub(open_file(folder / file, f"{data.name}/{file}"), repository, chosen) for file in chosen.files)


def stream_hub(data: HubData, count: int) -> Source:
    """Stream the first `count` records of a data set as one source. No file is stored, and nothing beyond the last
    block is requested. JSON lines and Parquet only: other formats must be read completely."""
    repository, chosen = _choose(data)
    if whole := [file for file in chosen.files if not file.lower().endswith(_STREAMED)]:
        what = f"{whole[0]} cannot be streamed; only JSON lines and Parquet can"
        raise InputError(Fault(data.name, what, "remove streaming", code="SF-DATA-HUB"))
    fixed = json.dumps([data.name, repository.commit, chosen.files, count])
    name = f"{data.name}/{chosen.files[0]}" if len(chosen.files) == 1 else f"{data.name} ({chosen.part})"

    def read() -> Iterator[tuple[int, Any]]:
        rows = (row for file in chosen.files for row in _streamed(repository, file))
        if len(chosen.files) > 1:  # number the rows across files: line numbers of several files would be ambiguous
            rows = ((number, value) for number, (_, value) in enumerate(rows, start=1))
        with hub_faults(data.name, "dataset", data.revision):
            yield from islice(rows, count)

    kind = data_kind(chosen.files[0]) or ""
    return _of_hub(Source(name, kind, hashlib.sha256(fixed.encode()).hexdigest(), read), repository, chosen)


def _choose(data: HubData) -> tuple[Repository, Chosen]:
    repository = look_up(data.name, "dataset", data.revision)
    readme = ""
    if _README in repository.files:
        readme = (fetch(repository, [_README]) / _README).read_text(encoding="utf-8", errors="replace")
    return repository, choose_files(data.name, repository.files, readme, data.subset, data.split, data.folder)


def _of_hub(source: Source, repository: Repository, chosen: Chosen) -> Source:
    return replace(source, commit=repository.commit, notes=(f"hub data set, {chosen.part}: {chosen.reason}",))


def _streamed(repository: Repository, file: str) -> Iterator[tuple[int, Any]]:
    from huggingface_hub import HfFileSystem

    name = f"{repository.name}/{file}"
    # A new instance: fsspec caches instances, and with them responses for an old token.
    files = HfFileSystem(skip_instance_cache=True)
    with bounded_client():
        opened: Any = files.open(f"datasets/{repository.name}@{repository.commit}/{file}", "rb", block_size=_BLOCK)
    with opened as content:
        if data_kind(file) == ".parquet":
            yield from read_parquet(name, content)
            return
        for number, line in enumerate(content, start=1):
            try:
                text = line.decode("utf-8").removeprefix("\ufeff" if number == 1 else "")
            except UnicodeDecodeError:
                raise InputError(
                    Fault(f"{name}:{number}", "is not UTF-8", "the file must be UTF-8", code="SF-DATA-FILE")
                ) from None
            yield from read_line(name, text.removesuffix("\n"), number, last=not text.endswith("\n"))
