"""From a YAML file and overrides to a checked config, or to one error that lists everything that is wrong.

    loaded = load_config("run.yaml", ["optim.lr=1e-5"])
    loaded.config.optim.lr, loaded.origins["optim.lr"]    # 1e-05, "override"

Nothing here imports torch, transformers or numpy: a mistake is reported in a fraction of a second.
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
from surefoot.config.schema import RunConfig
from surefoot.config.yaml_reader import parse_value, parse_yaml, read_text
from surefoot.system.errors import Fault, InputError

__all__ = ["LoadedConfig", "dump_config", "load_config", "plain_config"]


@dataclass(frozen=True)
class LoadedConfig:
    """A checked config, and where each of its values comes from.

    config: checked, defaults filled in.
    origins: dotted key -> "file:line", "override" or "default".
    path: the file, as it was named.
    given: what file and overrides set: plain values, short forms written out.
    """

    config: RunConfig
    origins: dict[str, str]
    path: str
    sources: Sources
    given: dict[str, Any]

    def locate(self, fault: Fault) -> Fault:
        """The fault at its place in the file or the override, where it names a key that was given there.

        Whoever checks the config later (the plan, above all) knows keys and no files.
        """
        key = typed_key(fault.where)
        group_given = key in self.sources.document.keys or key in self.sources.overrides
        if not group_given and self.origins.get(key, "default") == "default":
            return fault
        return replace(fault, where=self.sources.of_value(key), what=f"{shown_key(key)}: {fault.what}")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a config file, apply `key.sub=value` overrides, check everything that needs neither model nor machine.

    Raises InputError with one fault for each mistake: where it is, what is wrong, what to do.
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
    data = expand_home(data)
    reported = {fault.where for fault in faults}  # what the reader could not read says nothing about its type
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
    """Whether this YAML is a config of surefoot: each top-level key is one of ours, a model and data among them."""
    try:
        content = parse_value(text, "")
    except InputError:
        return False
    return isinstance(content, dict) and {"model", "data"} <= content.keys() <= RunConfig.model_fields.keys()


def check_config(data: Mapping[str, Any], *, files: bool = True) -> RunConfig:
    """A config from plain values, such as a Python caller writes them, checked as one from a file is.

    files: those that it names have to be here.

    Raises InputError with one fault for each mistake, which names the key.
    """
    _require_plain_keys(data)
    plain = expand_home(expand_short_forms(deepcopy(_with_texts(data))))
    problems = _problems(plain, files=files)
    if problems:
        raise InputError([Fault(shown_key(one.key), one.what, one.fix, one.code) for one in problems])
    return RunConfig.model_validate(plain)


def _with_texts(value: Any) -> Any:
    """Paths as a file would write them, at any depth."""
    if isinstance(value, Mapping):
        return {key: _with_texts(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [_with_texts(held) for held in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _require_plain_keys(value: Any, path: str = "") -> None:
    """As the reader of files does: places in a config are dotted paths, in which a key with a dot would be two."""
    for key, held in value.items() if isinstance(value, Mapping) else ():
        whole = f"{path}.{key}".lstrip(".")
        if not isinstance(key, str):
            raise InputError(
                Fault(
                    shown_key(whole), f"a key is text, and {key!r} is not", "write it in quotes", code="SF-CONFIG-KEY"
                )
            )
        if "." in key:
            raise InputError(
                Fault(shown_key(whole), "a key cannot hold a dot", "write one mapping in another", code="SF-CONFIG-KEY")
            )
        _require_plain_keys(held, whole)
    for number, held in enumerate(value) if isinstance(value, list) else ():
        _require_plain_keys(held, f"{path}.{number}")


def _check_is_file(path: Path) -> None:
    if path.is_dir():
        inside = path / "config.yaml"
        fix = f"did you mean {inside}?" if inside.is_file() else "name a YAML file"
        raise InputError(Fault(str(path), "is a folder, not a config file", fix, code="SF-CONFIG-FILE"))
    if not path.exists():
        raise InputError(
            Fault(str(path), "no such config file", nearest_path(path, (".yaml", ".yml")), code="SF-CONFIG-FILE")
        )


def _problems(data: dict[str, Any], *, files: bool = True) -> list[Problem]:
    """Shape first; then, over what has a usable shape, files (unless they are left alone) and contradictions."""
    problems = shape_problems(data)
    doubtful = {key for problem in problems for key in problem.involves}
    # What is usable is checked further: one run of the command is to show every mistake.
    config = RunConfig.model_validate(_repaired(data, problems))
    later = [*(path_problems(config) if files else ()), *contradictions(config)]
    problems += [
        replace(problem, key=written_key(problem.key, data))
        for problem in later
        if not any(_touches(schema_key(key), doubtful) for key in problem.involves)
    ]
    return without_consequences(problems)


def written_key(key: str, data: dict[str, Any]) -> str:
    """`data.train.0.weight` is `data.train.weight` where `data` has one source in place of a list, and the other way
    round where it has a list of one."""
    node: Any = data
    written: list[str] = []
    for part in key.split("."):
        if part.isdecimal() and isinstance(node, dict) and part not in node:
            continue
        if not part.isdecimal() and isinstance(node, list):  # of one source, which the short form shows without a list
            written.append("0")
            node = node[0]
        written.append(part)
        if isinstance(node, dict):
            node = node.get(part)
        elif isinstance(node, list):
            node = node[int(part)]
    return ".".join(written)


def _repaired(data: dict[str, Any], problems: Sequence[Problem]) -> dict[str, Any]:
    """A copy with a valid shape: what is unusable falls back to its default, or to the example of a required key."""
    data = deepcopy(data)
    paths = [concerned(problem) for problem in problems]
    for path in sorted(paths, key=lambda path: -path.count(".")):  # what is inside before what holds it
        *groups, name = path.split(".")
        group: Any = data
        for step in groups:
            group = group[int(step) if isinstance(group, list) else step]
        key = all_keys().get(schema_key(path))
        if key is not None and key.required and key.name == name:  # a key of digits looks like an item of a list
            group[name] = deepcopy(key.example)
        else:
            group.pop(name, None)  # gone already where a Python caller has put one mapping in two places
    return data


def _touches(key: str, doubtful: set[str]) -> bool:
    """Whether a key, its group or something in it is in doubt."""
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
    """Faults in the order of the file, then of the file as a whole, then of the overrides."""
    if fault.where.startswith("override "):
        return 2, list(overrides).index(fault.where.removeprefix("override ")), 0
    *_, line, column = ["", "", *fault.where.split(":")]
    return (0, int(line), int(column)) if line.isdecimal() and column.isdecimal() else (1, 0, 0)
