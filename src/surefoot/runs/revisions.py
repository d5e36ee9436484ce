"""Names on the hub mean branches, and branches move: a run reads the commits that they meant when it began.

config.yaml keeps what was asked for; the commits stand in data.json and are read from there on resume. Data sets that a
local dataset_info.json points at are among them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surefoot.config.schema import RunConfig
from surefoot.config.sections import SourceConfig
from surefoot.data.sources.dataset_info import read_description, read_entry
from surefoot.families.files import read_json
from surefoot.system.hub import look_up
from surefoot.system.locations import is_hub_data, looks_local


@dataclass(frozen=True)
class Name:
    """kind: model | dataset. revision: as asked for, None for the default branch."""

    kind: str
    name: str
    revision: str | None


@dataclass(frozen=True)
class Commit:
    """caution: why it is what the cache had, where the hub was away."""

    id: str
    caution: str = ""


Commits = Mapping[Name, Commit]
HUB = "hub"  # key of data.json


def pin(config: RunConfig, known: Commits) -> tuple[RunConfig, Commits]:
    """The config with commits for revisions, and these commits.

    known: commits that are taken as they are; the hub is asked for the others.

    Raises InputError for a name or revision that it does not have, EnvironmentFault where it cannot say.
    """
    commits: dict[Name, Commit] = {}

    def commit(kind: str, name: str, revision: str | None) -> str:
        requested = Name(kind, name, revision)
        if requested in known:
            commits[requested] = known[requested]
        elif requested not in commits:
            found = look_up(name, kind, revision)
            commits[requested] = Commit(found.commit, found.caution)
        return commits[requested].id

    def pinned(sources: Any) -> Any:
        return tuple(map(pin_source, sources)) if isinstance(sources, tuple) else sources

    def pin_source(source: SourceConfig) -> SourceConfig:
        name = hub_data_name(source)
        if name is None:
            return source
        return source.model_copy(update={"revision": commit("dataset", name, source.revision)})

    model, data = config.model, config.data
    if not looks_local(model.path):
        model = model.model_copy(update={"revision": commit("model", model.path, model.revision)})
    data = data.model_copy(update={"train": pinned(data.train), "eval": pinned(data.eval)})
    return config.model_copy(update={"model": model, "data": data}), commits


def hub_names(config: RunConfig) -> list[str]:
    """Models and data sets that a run of this config reads from the hub, each once, whether they are in the cache or
    not. Raises InputError where a folder's description cannot be read."""
    models = (config.model.path, config.alignment.reference, config.reward.init, config.ppo.reward, config.ppo.critic)
    groups = (config.data.train, config.data.eval)
    sources = [source for group in groups if isinstance(group, tuple) for source in group]
    named = [*(name for name in models if name and not looks_local(name)), *map(hub_data_name, sources)]
    return [name for name in dict.fromkeys(named) if name]


def hub_data_name(source: SourceConfig) -> str | None:
    """Of the data set that a source means, be it by an entry of a folder's description; None for what lies on disk."""
    if is_hub_data(source.path):
        return source.path
    entries = read_description(Path(source.path), source.path) if source.name is not None else None
    if source.name is None or entries is None:
        return None
    return read_entry(entries, source.name, source.path).hub


def commits_to_json(commits: Commits) -> list[dict[str, Any]]:
    """For data.json."""
    return [
        {**asdict(name), "commit": commit.id} | ({"caution": commit.caution} if commit.caution else {})
        for name, commit in commits.items()
    ]


def commits_from_json(saved: Sequence[Mapping[str, Any]]) -> Commits:
    return {
        Name(one["kind"], one["name"], one["revision"]): Commit(one["commit"], one.get("caution", "")) for one in saved
    }


def saved_commits(data_json: Path) -> Commits:
    """Those of an earlier start of the run; none where it wrote none."""
    return commits_from_json(read_json(data_json).get(HUB, [])) if data_json.is_file() else {}
