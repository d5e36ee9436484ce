"""Paths in a config, checked before anything heavy is imported: a missing model or data file is found in milliseconds.

A path that could be local is never taken for a hub id, so a misspelt folder cannot start a download.
"""

from __future__ import annotations

import os.path  # its tests answer False where pathlib's raise: names too long, folders that may not be read
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surefoot.config.nearest import nearest_word
from surefoot.config.problems import Problem

PATH_KEYS = ("model.path", "data.train", "data.eval", "output")
DATA_SUFFIXES = (".json", ".jsonl", ".ndjson")
MOST_LISTED = 5  # neighbours that a message lists

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def expand_home(data: dict[str, Any]) -> dict[str, Any]:
    """A copy in which `~/…` names the home folder, as a shell would have it."""
    expanded = {name: dict(value) if isinstance(value, dict) else value for name, value in data.items()}
    for key in PATH_KEYS:
        group, _, name = key.rpartition(".")
        section = expanded.get(group) if group else expanded
        if isinstance(section, dict) and isinstance(value := section.get(name), str) and value.startswith("~"):
            section[name] = os.path.expanduser(value)
    return expanded


def path_problems(values: dict[str, Any]) -> list[Problem]:
    """What the model path, the data files and the run folder lack, and where they are in each other's way.

    values: by dotted key; keys whose value is unusable are absent.
    """
    problems: list[Problem] = []
    model, output = values.get("model.path"), values.get("output")
    if isinstance(model, str):
        problems += _model(model)
        problems += _revision(model, values.get("model.revision"))
    if isinstance(output, str):
        problems += _output(output, model)
    if isinstance(train := values.get("data.train"), str):
        problems += _data_file("data.train", train)
    if isinstance(evaluation := values.get("data.eval"), str) and evaluation != "none":
        problems += _data_file("data.eval", evaluation)
    return problems


def looks_local(text: str) -> bool:
    """Whether a model path means a folder on this machine rather than a hub id such as org/name."""
    if text.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(text):
        return True
    return os.path.exists(text) or os.path.exists(os.path.dirname(text))


def nearest_path(path: Path, suffixes: tuple[str, ...], extra: tuple[str, ...] = ()) -> str:
    """Advice on a path that does not exist: the neighbour with the nearest name, else what stands there instead.

    suffixes: files that come into question besides folders. extra: words that could have been meant instead of a path.
    """
    missing = path
    while not os.path.exists(missing.parent):
        missing = missing.parent
    neighbours = [
        entry.name
        for entry in _entries(missing.parent)
        if not entry.name.startswith(".") and (entry.suffix.lower() in suffixes or os.path.isdir(entry))
    ]
    if (name := nearest_word(missing.name, [*neighbours, *extra])) is not None:
        near = missing.parent / name / path.relative_to(missing)
        found = name if name in extra else near if os.path.exists(near) else missing.parent / name
        return f"did you mean {found}?"
    folder = "the working folder" if str(missing.parent) == "." else str(missing.parent)
    listed = ", ".join(neighbours[:MOST_LISTED]) + (", …" if len(neighbours) > MOST_LISTED else "")
    return f"{folder} has {listed}" if neighbours else f"{folder} has nothing like it"


def _model(text: str) -> Iterator[Problem]:
    if not looks_local(text):
        return
    path = Path(text)
    if not os.path.exists(path):
        hint = "" if "/" in text else " (a hub id is written org/name)"
        yield _problem("model.path", f"folder {text} does not exist", nearest_path(path, ()) + hint)
    elif not os.path.isdir(path):
        yield _problem("model.path", f"{text} is a file", f"give its folder: {path.parent}")
    elif os.path.isfile(path / "adapter_config.json"):
        yield _problem("model.path", f"{text} holds an adapter, not a model", "name its base model")
    elif not os.path.isfile(path / "config.json"):
        yield _problem("model.path", f"{text} has no config.json", _model_inside(path))


def _model_inside(path: Path) -> str:
    inside = [str(entry) for entry in _entries(path) if os.path.isfile(entry / "config.json")]
    if inside:
        return "did you mean " + " or ".join(inside[:MOST_LISTED]) + "?"
    return "give a folder with config.json, *.safetensors and tokenizer files"


def _revision(model: str, revision: Any) -> Iterator[Problem]:
    if revision is not None and os.path.isdir(model):
        what = f"{model} is a folder on disk, which has no revisions"
        yield _problem("model.revision", what, "leave it out")


def _output(output: str, model: Any) -> Iterator[Problem]:
    if os.path.isfile(output):
        yield _problem("output", f"{output} is a file", "name a folder")
    elif isinstance(model, str) and os.path.isdir(output) and os.path.isdir(model) and os.path.samefile(model, output):
        yield _problem("output", "is the model's own folder", "name another folder")


def _data_file(key: str, text: str) -> Iterator[Problem]:
    path = Path(text)
    if not os.path.exists(path):
        extra = ("none",) if key == "data.eval" else ()
        yield _problem(key, f"file {text} does not exist", nearest_path(path, DATA_SUFFIXES, extra))
    elif os.path.isdir(path):
        inside = [str(entry) for entry in _entries(path) if entry.suffix.lower() in DATA_SUFFIXES]
        fix = "did you mean " + " or ".join(inside[:MOST_LISTED]) + "?" if inside else "name a file in it"
        yield _problem(key, f"{text} is a folder", fix)
    elif path.suffix.lower() not in DATA_SUFFIXES:
        what = f"{text} ends in {path.suffix}" if path.suffix else f"{text} has no suffix"
        yield _problem(key, what, "give a .json or .jsonl file")


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _problem(key: str, what: str, fix: str) -> Problem:
    return Problem(key, what, fix, "value", (key,))
