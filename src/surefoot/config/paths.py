"""Check the paths in a config before heavy imports, so that a missing model or data file is found in milliseconds.

A path that could be local is never treated as a hub id, so a misspelled folder cannot start a download.
"""

from __future__ import annotations

import os.path  # returns False where pathlib raises: names too long, unreadable folders
import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from surefoot.config.keys import typed_key
from surefoot.config.problems import Problem
from surefoot.config.schema import RunConfig
from surefoot.config.sections import SourceConfig
from surefoot.system.locations import DATA_SUFFIXES, DESCRIPTION, is_hub_data, looks_local
from surefoot.system.messages import CLOSE, likeness, nearest_word

_PERCENT = re.compile(r"(\d+(?:\.\d+)?) ?%")  # a percentage
_ONLY_ON_THE_HUB = ("subset", "split", "revision", "streaming")
MOST_LISTED = 5  # entries of a folder that a message lists

_SUFFIXES = ".json, .jsonl, .csv, .tsv, .parquet or .txt"


def expand_home(data: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `~` expanded in all paths. data: plain config with short forms expanded."""
    data = deepcopy(data)
    section = data.get("data")
    requested = [section[name] for name in ("train", "eval") if name in section] if isinstance(section, dict) else []
    sources = [item for value in requested for item in (value if isinstance(value, list) else [value])]
    paths = [(data.get("model"), "path"), (data, "output"), (section, "template"), (data.get("adapter"), "initial")]
    for group, name in [*paths, *((source, "path") for source in sources)]:
        if isinstance(group, dict) and isinstance(value := group.get(name), str) and value.startswith("~"):
            group[name] = os.path.expanduser(value)
    return data


def path_problems(config: RunConfig) -> list[Problem]:
    """Return problems with the model path, data sources and run folder, and conflicts between them."""
    model = config.model.path
    problems = [*model_problems(model), *_revision("model.path", model, config.model.revision)]
    problems += _output(config.output, model)
    if config.adapter is not None:
        problems += _revision("adapter.initial", config.adapter.initial, config.adapter.initial_revision)
    named = {"ppo.reward": config.ppo.reward, "ppo.critic": config.ppo.critic, "reward.init": config.reward.init}
    named |= {typed_key(key): name for name, key in config.grpo.reward_models.items()}
    for key, text in named.items():
        problems += _scored(key, text)
    for key, sources in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if isinstance(sources, tuple):
            for number, source in enumerate(sources):
                problems += _source(f"{key}.{number}", source)
    return problems


def nearest_path(path: Path, suffixes: tuple[str, ...], extra: tuple[str, ...] = ()) -> str:
    """Suggest an alternative to a missing path: the entry with the most similar name, else a list of entries.

    suffixes: suffixes of suitable files; folders are always suitable.
    extra: keywords that could have been meant instead of a path.
    """
    missing = path
    while not os.path.exists(missing.parent):
        missing = missing.parent
    neighbors = [
        entry.name
        for entry in _entries(missing.parent)
        if not entry.name.startswith(".")
        and os.path.exists(entry)
        and (entry.name.lower().endswith(suffixes) or os.path.isdir(entry))
    ]
    # A suffix in common makes no names alike: pt.jsonl is not meant by alpca.json.
    alike = [name for name in neighbors if likeness(missing.stem, Path(name).stem) >= CLOSE]
    if (name := nearest_word(missing.name, [*alike, *extra])) is not None:
        near = missing.parent / name / path.relative_to(missing)
        found = name if name in extra else near if os.path.exists(near) else missing.parent / name
        return f"did you mean {found}?"
    folder = "the working folder" if str(missing.parent) == "." else str(missing.parent)
    listed = ", ".join(neighbors[:MOST_LISTED]) + (", …" if len(neighbors) > MOST_LISTED else "")
    return f"{folder} has {listed}" if neighbors else f"{folder} has nothing similar"


def model_problems(text: str) -> Iterator[Problem]:
    """Yield why a local path is not a model folder; nothing for a hub id."""
    if not looks_local(text):
        return
    path = Path(text)
    if not os.path.exists(path):
        hint = "" if "/" in text else " (a hub id is written org/name)"
        yield _problem("model.path", _absent("folder", text), nearest_path(path, ()) + hint)
    elif not os.path.isdir(path):
        yield _problem("model.path", f"{text} is a file", f"give its folder: {path.parent}")
    elif os.path.isfile(path / "adapter_config.json"):
        merged = f"merge it with `surefoot export {text} --merge --out DIR` and give DIR"
        fix = f"{merged}, or give its base and go on with the adapter: `adapter.initial: {text}`"
        yield _problem("model.path", f"{text} contains an adapter, not a model", fix)
    elif not os.path.isfile(path / "config.json"):
        yield _problem("model.path", f"{text} has no config.json", _model_inside(path))


def _scored(key: str, text: str | None) -> Iterator[Problem]:
    """Check a reward model folder; functions and servers are checked elsewhere."""
    if text is None or ":" in text or not looks_local(text) or os.path.exists(text):
        return
    yield _problem(key, _absent("folder", text), nearest_path(Path(text), ()))


def _model_inside(path: Path) -> str:
    inside = [str(entry) for entry in _entries(path) if os.path.isfile(entry / "config.json")]
    if inside:
        return "did you mean " + " or ".join(inside[:MOST_LISTED]) + "?"
    return "give a folder with config.json, *.safetensors and tokenizer files"


def _revision(key: str, model: str | None, revision: str | None) -> Iterator[Problem]:
    own = {"model.path": "model.revision"}.get(key, f"{key}_revision")
    if revision is not None and (model is None or os.path.isdir(model)):
        what = f"{key} names nothing" if model is None else f"{model} is a folder on disk, which has no revisions"
        yield _problem(own, what, "leave it out", key)


def _output(output: str, model: Any) -> Iterator[Problem]:
    if os.path.isfile(output):
        yield _problem("output", f"{output} is a file", "give a folder")
    elif isinstance(model, str) and os.path.isdir(output) and os.path.isdir(model) and os.path.samefile(model, output):
        yield _problem("output", "is the model's own folder", "give another folder", "model.path")


def _source(key: str, source: SourceConfig) -> Iterator[Problem]:
    text, path = source.path, Path(source.path)
    if is_hub_data(text):
        if source.name is not None:
            what = f"refers to an entry in a folder's {DESCRIPTION}, but {text} is a hub dataset"
            yield _problem(f"{key}.name", what, "choose a configuration with subset", f"{key}.path")
        return
    split_of_folder = os.path.isdir(path) and source.name is None
    for name in _ONLY_ON_THE_HUB:
        if name == "split" and (split_of_folder or source.split == "train"):  # a file is one split, train
            continue
        if getattr(source, name) != SourceConfig.model_fields[name].default:
            what = f"is for hub datasets, but {text} is a local path"
            yield _problem(f"{key}.{name}", what, "leave it out", f"{key}.path")
    if source.name is not None and os.path.isfile(path):
        what = f"refers to an entry in a folder's {DESCRIPTION}, but {text} is a file"
        yield _problem(f"{key}.name", what, "leave it out, or give the folder", f"{key}.path")
    yield from _data_path(f"{key}.path", text)


def _data_path(key: str, text: str) -> Iterator[Problem]:
    path = Path(text)
    if not os.path.exists(path) and key.startswith("data.eval") and (share := _PERCENT.fullmatch(text)):
        fix = f"write {float(share[1]) / 100:g} to hold out {share[1]} % of the training data"
        yield _problem(key, f"{text} is not a file; a fraction is a number below 1", fix)
    elif not os.path.exists(path):
        extra = ("none",) if key.startswith("data.eval") else ()
        yield _problem(key, _absent("file", text), nearest_path(path, DATA_SUFFIXES, extra))
    elif os.path.isdir(path):
        if not _holds_data(path):
            yield _problem(key, f"folder {text} has no data file", f"put {_SUFFIXES} files in it")
    elif not path.name.lower().endswith(DATA_SUFFIXES):
        what = f"{text} ends in {path.suffix}" if path.suffix else f"{text} has no suffix"
        yield _problem(key, what, f"give a {_SUFFIXES} file")


def _absent(kind: str, text: str) -> str:
    if os.path.islink(text):
        return f"{text} is a link to {os.readlink(text)}, which does not exist"
    return f"{kind} {text} does not exist"


def _holds_data(folder: Path) -> bool:
    """Return whether a folder or its direct subfolders contain data files, as downloaded datasets do."""
    entries = _entries(folder)
    files = [*entries, *(inner for entry in entries if os.path.isdir(entry) for inner in _entries(entry))]
    return any(file.name.lower().endswith(DATA_SUFFIXES) for file in files)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _problem(key: str, what: str, fix: str, *others: str) -> Problem:
    return Problem(key, what, fix, "value", (key, *others), "SF-FILE-MISSING")
