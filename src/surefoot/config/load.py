"""Load a checked config from a YAML file and overrides, or raise one error that lists every mistake.

    loaded = load_config("run.yaml", ["optim.lr=1e-5"])
    loaded.config.optim.lr, loaded.origins["optim.lr"]    # 1e-05, "override"

Nothing here imports torch, transformers or numpy, so mistakes are reported in a fraction of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.config.contradictions import contradictions
from surefoot.config.dump import dump_config, plain_config
from surefoot.config.keys import all_keys, schema_key, shown_key, typed_key
from surefoot.config.overrides import Sources, apply_override, expand_short_forms
from surefoot.config.paths import expand_home, nearest_path, path_problems
from surefoot.config.problems import Problem, concerned, shape_problems, without_consequences
from surefoot.config.saved_shape import with_saved_shape
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import parse_value, parse_yaml, read_text
from surefoot.system.errors import Fault, InputError

__all__ = ["LoadedConfig", "dump_config", "load_config", "plain_config"]


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config, and where each value comes from.

    config: the checked config with defaults.
    origins: dotted key -> "file:line", "override" or "default".
    path: the file as given.
    sources: positions of keys in the file, and the overrides.
    given: plain values set by file and overrides, with short forms expanded and the shape of a saved adapter.
    """

    config: RunConfig
    origins: dict[str, str]
    path: str
    sources: Sources
    given: dict[str, Any]

    def locate(self, fault: Fault) -> Fault:
        """Point a fault that names a given key to its place in the file or the override.

        Later checks, such as the plan's, know only keys.
        """
        key = typed_key(fault.where)
        group_given = key in self.sources.document.keys or key in self.sources.overrides
        if not group_given and self.origins.get(key, "default") == "default":
            return fault
        return replace(fault, where=self.sources.of_value(key), what=f"{shown_key(key)}: {fault.what}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Load a config file, apply `key.sub=value` overrides, and check everything that needs neither model nor machine.

    Raises InputError with one fault per mistake: where it is, what is wrong, what to do.
    """
    path = Path(path)
    _check_is_file(path)
    document, faults = parse_yaml(read_text(path), str(path))
    sources = Sources(document)
    data = expand_short_forms(document.data)
    for text in overrides:
        try:
            data = apply_override(data, text, sources)
        except InputError as error:
            faults += error.faults
    data = with_saved_shape(expand_home(data))
    reported = {fault.where for fault in faults}  # a value that could not be parsed has no type to check
    problems = [_place(problem, sources) for problem in _problems(data)]
    faults += [fault for fault in problems if fault.where not in reported]
    if faults:
        raise InputError(sorted(faults, key=lambda fault: _order(fault, overrides)))
    config = RunConfig.model_validate(data)
    given = {key for key, _ in _leaves(data)}
    whole = expand_short_forms(plain_config(config))
    origins = {
        key: sources.origin(written) if (written := written_key(key, data)) in given else "default"
        for key, _ in _leaves(whole)
    }
    return LoadedConfig(config, origins, str(path), sources, data)


def is_run_config(text: str) -> bool:
    """Return whether YAML text is a surefoot config: only known top-level keys, including model and data."""
    try:
        content = parse_value(text, "")
    except InputError:
        return False
    return isinstance(content, dict) and {"model", "data"} <= content.keys() <= RunConfig.model_fields.keys()


def check_config(data: Mapping[str, Any], *, files: bool = True) -> RunConfig:
    """Check plain values from a Python caller as a config file is checked, and return the config.

    files: whether to check that the named files exist.
    Raises InputError with one fault per mistake, which names the key.
    """
    _require_plain_keys(data)
    plain = expand_home(expand_short_forms(deepcopy(_with_texts(data))))
    if files:
        plain = with_saved_shape(plain)
    problems = _problems(plain, files=files)
    if problems:
        raise InputError([Fault(shown_key(one.key), one.what, one.fix, one.code) for one in problems])
    return RunConfig.model_validate(plain)


def _with_texts(value: Any) -> Any:
    """Convert path objects to text, at any depth."""
    if isinstance(value, Mapping):
        return {key: _with_texts(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(inner) for inner in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _require_plain_keys(value: Any, path: str = "") -> None:
    """Raise unless all keys are text without dots, as in a file: a dotted path could not address such a key."""
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        whole = f"{path}.{key}".lstrip(".")
        if not isinstance(key, str):
            raise InputError(
                Fault(shown_key(whole), f"keys must be text, got {key!r}", "write it in quotes", code="SF-CONFIG-KEY")
            )
        if "." in key:
            raise InputError(
                Fault(shown_key(whole), "a key cannot contain a dot", "nest mappings instead", code="SF-CONFIG-KEY")
            )
        _require_plain_keys(inner, whole)
    for number, inner in enumerate(value) if isinstance(value, list) else ():
        _require_plain_keys(inner, f"{path}.{number}")


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        inside = path / "config.yaml"
        fix = f"did you mean {inside}?" if inside.is_file() else "give a YAML file"
        raise InputError(Fault(str(path), "is a folder, not a config file", fix, code="SF-CONFIG-FILE"))
    if not path.exists():
        raise InputError(
            Fault(str(path), "no such config file", nearest_path(path, (".yaml", ".yml")), code="SF-CONFIG-FILE")
        )


def _problems(data: dict[str, Any], *, files: bool = True) -> list[Problem]:
    """Check types first; then, for usable values, files (if `files`) and contradictions."""
    problems = shape_problems(data)
    doubtful = {key for problem in problems for key in problem.involves}
    # Usable values are checked further, so that one run of the command shows every mistake.
    config = RunConfig.model_validate(_repaired(data, problems))
    later = [*(path_problems(config) if files else ()), *contradictions(config)]
    problems += [
        replace(problem, key=written_key(problem.key, data))
        for problem in later
        if not any(_touches(schema_key(key), doubtful) for key in problem.involves)
    ]
    return without_consequences(problems)


def written_key(key: str, data: dict[str, Any]) -> str:
    """Return a key as the user wrote it: `data.train.0.weight` becomes `data.train.weight` if `data` has one source
    instead of a list, and the reverse for a list of one."""
    node: Any = data
    written: list[str] = []
    for part in key.split("."):
        if part.isdecimal() and isinstance(node, dict) and part not in node:
            continue
        if not part.isdecimal() and isinstance(node, list):  # a list of one source, whose key has no position
            written.append("0")
            node = node[0]
        written.append(part)
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list):
            node = node[int(part)]
    return ".".join(written)


def _repaired(data: dict[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return a valid copy: unusable values fall back to the default, or to the example of a required key."""
    data = deepcopy(data)
    paths = [concerned(problem) for problem in problems]
    for path in sorted(paths, key=lambda path: -path.count(".")):  # nested keys before their groups
        *groups, name = path.split(".")
        holder = all_keys().get(schema_key(".".join(groups)))
        if holder is not None and not holder.children and groups[-1].isdecimal():
            groups, name = groups[:-2], groups[-2]  # an entry of a list whose entries have no keys: leave out the list
        group: Any = data
        for step in groups:
            group = group[int(step) if isinstance(group, list) else step]
        key = all_keys().get(schema_key(path))
        if key is not None and key.required and key.name == name:  # a key of digits looks like a list position
            group[name] = deepcopy(key.example)
        else:
            group.pop(name, None)  # already removed if a Python caller used one mapping in two places
    return data


def _touches(key: str, doubtful: set[str]) -> bool:
    """Return whether a key, its group or a nested key is doubtful."""
    return any(key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.") for other in doubtful)


def _leaves(data: dict[str, Any], group: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in data.items():
        key = f"{group}.{name}" if group else name
        if isinstance(value, dict):
            yield from _leaves(value, key)
        elif isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            yield from _leaves({str(number): item for number, item in enumerate(value)}, key)
        else:
            yield key, value


def _place(problem: Problem, sources: Sources) -> Fault:
    where = {"key": sources.of_key, "value": sources.of_value, "group": sources.of_group}[problem.at](problem.key)
    return Fault(where, f"{shown_key(problem.key)}: {problem.what}", problem.fix, problem.code)


def _order(fault: Fault, overrides: Sequence[str]) -> tuple[int, int, int]:
    """Sort key: faults in file order, then those of the whole file, then those of overrides."""
    if fault.where.startswith("override "):
        return 2, list(overrides).index(fault.where.removeprefix("override ")), 0
    *_, line, column = ["", "", *fault.where.split(":")]
    return (0, int(line), int(column)) if line.isdecimal() and column.isdecimal() else (1, 0, 0)
