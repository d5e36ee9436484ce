"""Pin names on the hub to commits: branches move, and a run must read what it started with.

config.yaml keeps the branches; the commits are in data.json, from which a resumed run reads them. Data sets named in a
local dataset_info.json are included.
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
    """A name on the hub. kind: model | dataset. revision: as requested; None for the default branch."""

    kind: str
    name: str
    revision: str | None


@dataclass(frozen=True)
class Commit:
    """A commit on the hub. caution: why it was taken from the cache, if the hub was not reachable."""

    id: str
    caution: str = ""


Commits = Mapping[Name, Commit]
HUB = "hub"  # key of data.json


def pin(config: RunConfig, known: Commits) -> tuple[RunConfig, Commits]:
    """Replace revisions in the config by commits, and return these commits.

    known: commits to use as they are; the hub is asked for the others.

    Raises InputError for an unknown name or revision, EnvironmentFault if the hub cannot be reached.
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
    adapter = config.adapter
    if adapter is not None and adapter.initial is not None and not looks_local(adapter.initial):
        found = commit("model", adapter.initial, adapter.initial_revision)
        adapter = adapter.model_copy(update={"initial_revision": found})
    data = data.model_copy(update={"train": pinned(data.train), "eval": pinned(data.eval)})
    return config.model_copy(update={"model": model, "adapter": adapter, "data": data}), commits


def hub_names(config: RunConfig) -> list[str]:
    """Return the models and data sets that the run reads from the hub, without duplicates, cached or not. Raises
    InputError if a folder's description cannot be read."""
    scored = (config.reward.init, config.ppo.reward, config.ppo.critic, *config.grpo.reward_models)
    scored += (config.distill.teacher, config.adapter.initial if config.adapter else None)
    models = (config.model.path, config.alignment.reference, *scored)
    groups = (config.data.train, config.data.eval)
    sources = [source for group in groups if isinstance(group, tuple) for source in group]
    named = [*(name for name in models if name and not looks_local(name)), *map(hub_data_name, sources)]
    return [name for name in dict.fromkeys(named) if name]


def hub_data_name(source: SourceConfig) -> str | None:
    """The hub data set of a source, also through a folder's dataset_info.json; None for local data."""
    if is_hub_data(source.path):
        return source.path
    entries = read_description(Path(source.path), source.path) if source.name is not None else None
    if source.name is None or entries is None:
        return None
    return read_entry(entries, source.name, source.path).hub


def commits_to_json(commits: Commits) -> list[dict[str, Any]]:
    """Format the commits for data.json."""
    return [
        {**asdict(name), "commit": commit.id} | ({"caution": commit.caution} if commit.caution else {})
        for name, commit in commits.items()
    ]


def commits_from_json(saved: Sequence[Mapping[str, Any]]) -> Commits:
    return {
        Name(one["kind"], one["name"], one["revision"]): Commit(one["commit"], one.get("caution", "")) for one in saved
    }


def saved_commits(data_json: Path) -> Commits:
    """Read the commits of an earlier start of the run; empty if there is no record."""
    return commits_from_json(read_json(data_json).get(HUB, [])) if data_json.is_file() else {}
