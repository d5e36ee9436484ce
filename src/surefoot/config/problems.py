"""Translate pydantic's errors to problems by dotted key. Places in the file are added later."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from surefoot.config.keys import Key, all_keys, as_yaml, schema_key, shown, shown_key
from surefoot.config.schema import RunConfig
from surefoot.config.suggestions import ELSEWHERE, nearest_key
from surefoot.config.yaml_scalars import is_plain_text
from surefoot.method_facts.losses import OTHER_WAYS
from surefoot.system.messages import MOST, nearest_word, plain_name

MOST_LISTED = 9  # keys of a group in one message


@dataclass(frozen=True)
class Problem:
    """One mistake in a config.

    key: dotted path as the user wrote it (an unknown key, or "adapter.targets.0").
    at: the part of `key: value` to point at; "group" if the key is absent.
    involves: schema keys whose values later checks must not use.
    code: see `surefoot.system.errors.Fault`.
    """

    key: str
    what: str
    fix: str
    at: Literal["key", "value", "group"]
    involves: tuple[str, ...]
    code: str = "SF-CONFIG-VALUE"


def shape_problems(data: dict[str, Any]) -> list[Problem]:
    """Return unknown and missing keys, wrong types and values out of range: all of them, one per key."""
    try:
        RunConfig.model_validate(data)
    except ValidationError as error:
        problems: dict[tuple[str, str], Problem] = {}
        for number, item in enumerate(error.errors(include_url=False)):
            problem = _translate(item["type"], item["loc"], data, suggest=number < MOST)
            subject = (problem.at, concerned(problem))
            known = problems.get(subject)
            # Each branch of a union reports an error: keep the most specific.
            if known is None or len(problem.key) > len(known.key):
                problems[subject] = problem
        found = list(problems.values())
        above = {prefix for one in found for prefix in _above(one.key)}
        return [one for one in found if one.key not in above]
    return []


def _above(path: str) -> Iterator[str]:
    """Yield the groups above a path: "a.b" and "a" for "a.b.c"."""
    while path := path.rpartition(".")[0]:
        yield path


def concerned(problem: Problem) -> str:
    """Return the path of the key that a problem is about, without positions or entries inside its value."""
    path = problem.key
    while problem.at == "value" and (path.rpartition(".")[2].isdecimal() or schema_key(path) != problem.involves[0]):
        path = path.rpartition(".")[0]
    return path


def without_consequences(problems: list[Problem]) -> list[Problem]:
    """Remove reports of missing keys that a misspelled key was meant to be: that is one mistake."""
    meant = {key for problem in problems if problem.at == "key" for key in problem.involves}
    return [
        problem
        for problem in problems
        if problem.at != "group" or not any(f"{key}.".startswith(f"{schema_key(problem.key)}.") for key in meant)
    ]


def _translate(kind: str, location: tuple[int | str, ...], data: Any, *, suggest: bool) -> Problem:
    """Translate one pydantic error.

    location: path into `data`, mixed with pydantic's names of union branches, which are skipped.
    suggest: whether to look for the nearest key.
    """
    path, node, beside = "", data, data
    for number, part in enumerate(location, start=1):
        step = f"{path}.{part}" if path else str(part)
        items: Any = dict(enumerate(node)) if isinstance(node, list) else node
        if isinstance(items, dict) and part in items:
            path, node, beside = step, items[part], items
        elif kind == "missing" and number == len(location) and schema_key(step) != schema_key(path):
            return _missing(step, items)
    return _unknown(path, beside, suggest) if kind == "extra_forbidden" else _wrong(path, node)


def _missing(path: str, given: Any) -> Problem:
    """given: the values beside it."""
    above, _, name = path.rpartition(".")
    key, group = all_keys().get(schema_key(path)), shown_key(above)
    under = f" under {group}" if group else ""
    added = f"{key.name}: {as_yaml(key.example)}" if key else f"{name}: …"  # items of a list have no keys of their own
    keys = (key.path,) if key else (schema_key(above),)
    if path == "adapter.kind" and "initial" in given:
        what = f"is required: {given['initial']} has no adapter_config.json on this machine that says it"
        fix = "name a folder that has one, or add all: kind, rank, alpha, rslora, targets, modules_to_save"
        return Problem(path, what, fix, "group", keys, "SF-CONFIG-KEY")
    return Problem(path, "is required", f"add `{added}`{under}", "group", keys, "SF-CONFIG-KEY")


def _unknown(path: str, given: Mapping[str, Any], suggest: bool) -> Problem:
    """given: the keys and values beside it, its own included."""
    above, _, name = path.rpartition(".")
    group = schema_key(above)
    if name.isdecimal() and above:
        fix = f"{shown_key(above)} is no list; leave [{name}] out"
        return Problem(path, "unknown key", fix, "key", (), "SF-CONFIG-KEY")
    near = nearest_key(schema_key(path), given) if suggest else None
    beside = [key.name for key in all_keys().values() if key.group == group]
    listed = (
        f"{group} has {', '.join(beside)}"
        if len(beside) <= MOST_LISTED
        else f"`surefoot explain {group}` lists its keys"
    )
    if near is not None and near.group == group:
        return Problem(path, "unknown key", f"did you mean {near.name}?", "key", (near.path,), "SF-CONFIG-KEY")
    if near is not None and group in all_keys() and near.name == plain_name(name):  # of its own group none is meant
        fix = f"{listed}; {near.path} is another key"
        return Problem(path, "unknown key", fix, "key", (), "SF-CONFIG-KEY")
    if near is not None:
        nested = f" (key {near.name} under {near.group})" if near.group else ""
        return Problem(path, "unknown key", f"did you mean {near.path}?{nested}", "key", (near.path,), "SF-CONFIG-KEY")
    if elsewhere := ELSEWHERE.get(plain_name(name)):
        return Problem(path, "unknown key", elsewhere, "key", (), "SF-CONFIG-KEY")
    fix = listed if beside and group else "`surefoot explain` lists all keys"
    return Problem(path, "unknown key", fix, "key", (), "SF-CONFIG-KEY")


def _wrong(path: str, value: Any) -> Problem:
    name = schema_key(path)
    while name not in all_keys():
        name = name.rpartition(".")[0]
    key = all_keys()[name]
    expected = key.item if key.item and path != name else key.expected
    if isinstance(value, float) and not math.isfinite(value):
        expected = expected.replace("a number", "a finite number")
    return Problem(path, f"expected {expected}, got {shown(value)}", _remedy(key, value), "value", (name,))


def _remedy(key: Key, value: Any) -> str:
    if isinstance(value, str):
        if value in OTHER_WAYS and key.name in ("stage", "loss"):
            return OTHER_WAYS[value]
        if (word := nearest_word(value, key.choices)) is not None:
            return f"write `{key.name}: [{word}]`" if key.item and word == value else f"did you mean {word}?"
        if value and not is_plain_text(value) and not key.children:
            return "remove the quotes"
    elif key.expected.startswith("text") and isinstance(value, bool | int | float):
        return "put it in quotes"
    return f"for example `{key.name}: {as_yaml(key.example)}`"
