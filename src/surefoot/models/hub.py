"""From a model's name to a folder: a local one as it is, a hub id by way of Hugging Face's cache.

Only files that surefoot reads are fetched, those of an adapter among them; pickled weights never. How the hub's
refusals are worded stands in `surefoot.system.hub.faults`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from surefoot.system.errors import EnvironmentFault, Fault, InputError
from surefoot.system.hub.fetch import fetch, look_up
from surefoot.system.locations import looks_local

_FACTS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "adapter_config.json",
    "plan.json",
    "bos_zero_config.json",
)
# Not *.safetensors: some repositories hold the same weights twice, under consolidated.safetensors or original/.
_WEIGHTS = (
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "adapter_model.safetensors",
)
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors")


@dataclass(frozen=True)
class FoundModel:
    """commit: of a model from the hub, which `folder` holds; None for a folder of the user's own."""

    folder: Path
    commit: str | None


def find_model(path: str, revision: str | None = None, *, weights: bool) -> FoundModel:
    """A model or adapter. path: a folder, or a hub id such as org/name. weights: fetch those as well.

    Raises InputError for a folder that does not exist or a model or revision that the hub does not have,
    EnvironmentFault for a hub that cannot be reached or denies access, and for a disk without room.
    """
    if Path(path).is_dir():
        if revision is not None:
            what = f"{path} is a folder, and only hub models have revisions"
            raise InputError(Fault("model.revision", what, "leave it out"))
        return FoundModel(Path(path), None)
    if looks_local(path):
        fix = "give a folder, or a hub id such as org/name"
        raise InputError(Fault("model.path", f"folder {path} does not exist", fix))
    repository = look_up(path, "model", revision)
    patterns = (*_FACTS, *(_WEIGHTS if weights else ()))
    wanted = [name for name in repository.files if any(fnmatchcase(name, pattern) for pattern in patterns)]
    _require_all_shards(path, wanted)
    return FoundModel(fetch(repository, wanted), repository.commit)


def resolve_folder(path: str, revision: str | None = None, *, weights: bool) -> Path:
    """The folder of `find_model`."""
    return find_model(path, revision, weights=weights).folder


def _require_all_shards(path: str, names: Collection[str]) -> None:
    """A cache without a listing may hold some of them only."""
    there: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for name in names:
        if shard := _SHARD.fullmatch(name):
            there[shard[1], int(shard[3])].add(int(shard[2]))
    for (stem, count), numbers in there.items():
        if len(numbers) < count:
            what = f"its weights are not all in the cache: {len(numbers)} of {count} files of {stem}"
            raise EnvironmentFault(Fault(path, what, "start again while the hub can be reached"))
