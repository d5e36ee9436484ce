"""Apply command-line overrides to a plain config, and track where each key comes from.

    optim.lr=1e-5    adapter=null    data.train=[a.json, b.csv]    data.train[1].weight=2

The value of an override is YAML. It replaces the file's value of the key; later overrides win.
`Sources` stores the line of the file or the override of each key, for messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from surefoot.config.keys import shown_key, typed_key
from surefoot.config.schema import RunConfig
from surefoot.config.types import ShortForm
from surefoot.config.yaml_reader import Document, parse_value, place
from surefoot.system.errors import Fault, InputError


@dataclass
class Sources:
    """Positions of keys in the file, overlaid with the overrides in their order."""

    document: Document
    overrides: dict[str, str] = field(default_factory=dict)  # dotted key -> the override as typed

    def override(self, key: str, text: str) -> None:
        """Record that `key`, with everything nested in it, comes from the override `text`."""
        self.overrides = {known: typed for known, typed in self.overrides.items() if not known.startswith(f"{key}.")}
        self.overrides[key] = text

    def of_key(self, key: str) -> str:
        """Return the place of a key, such as "run.yaml:3:1", or its override."""
        return self._where(key, self.document.keys)

    def of_value(self, key: str) -> str:
        return self._where(key, self.document.values)

    def of_group(self, key: str) -> str:
        """Return the place for a message about an absent key: its group, or the file for a top-level key."""
        group = key.rpartition(".")[0]
        if group.rpartition(".")[2].isdecimal():  # a list item has no key
            return self.of_value(group)
        return self.of_key(group) if group else self.document.path

    def origin(self, key: str) -> str:
        """Return "override" or "file:line" for a given key."""
        if self._override(key) is not None:
            return "override"
        for name in _upwards(key):
            if name in self.document.keys:
                return f"{self.document.path}:{self.document.keys[name].line}"
        raise KeyError(key)

    def _where(self, key: str, positions: dict[str, Any]) -> str:
        typed = self._override(key)
        if typed is not None:
            return f"override {typed}"
        for name in _upwards(key):
            if name in positions:
                return place(self.document.path, positions[name])
        return self.document.path

    def _override(self, key: str) -> str | None:
        """Return the override that sets `key` or a group above it."""
        return next((self.overrides[name] for name in _upwards(key) if name in self.overrides), None)


def _upwards(key: str) -> Iterator[str]:
    """Yield "a.b.c", "a.b", "a"."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, or None if it is not set."""
    for part in key.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return None
        config = config[part]
    return config


def set_at(config: dict[str, Any], key: str, new: Any) -> None:
    """Set a dotted key in place, creating groups; None removes it."""
    *groups, name = key.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    if new is None:
        config.pop(name, None)
    else:
        config[name] = new


def with_settings(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a plain config with some values replaced. settings: dotted key -> value."""
    config = deepcopy(dict(given))
    for key, new in settings.items():
        group = key.split(".")[0]
        if "." in key and not isinstance(config.get(group, {}), dict):  # a short form, such as precision: auto
            config.pop(group)
        set_at(config, key, new)
    return config


_SHORT_FORMS = {
    name: part.field
    for name, info in RunConfig.model_fields.items()
    for part in info.metadata
    if isinstance(part, ShortForm)
}


def expand_short_forms(data: dict[str, Any]) -> dict[str, Any]:
    """Return a copy with `model: path` expanded to `model: {path: path}`, so that every value has its full key.

    Sources in data.train and data.eval are expanded as well. A single source is not wrapped in a list, so that its keys
    keep the user's paths.
    """
    data = {
        name: {_SHORT_FORMS[name]: value} if name in _SHORT_FORMS and not isinstance(value, dict) else value
        for name, value in data.items()
    }
    if isinstance(section := data.get("data"), dict):
        data["data"] = section | {name: _expand_source(section[name]) for name in ("train", "eval") if name in section}
    return data


def _expand_source(value: Any) -> Any:
    if isinstance(value, list):
        return [_expand_source(item) for item in value]
    return {"path": value} if isinstance(value, str) and value != "none" else value


def apply_override(data: dict[str, Any], text: str, sources: Sources) -> dict[str, Any]:
    """Return `data` (short forms expanded) with one override applied, and record it in `sources`. Raises InputError."""
    typed, equals, written = text.partition("=")
    key = typed_key(typed.strip())
    if not equals or not all(key.split(".")):
        raise InputError(
            Fault(f"override {text}", "is not key=value", "write it like optim.lr=1e-5", code="SF-CONFIG-OVERRIDE")
        )
    value = parse_value(written, f"override {text}")
    data = dict(data)
    group: Any = data
    path = ""
    *groups, last = key.split(".")
    for name in groups:
        path = f"{path}.{name}" if path else name
        at = _place_in(group, name, path, text)
        inner = group.get(at) if isinstance(group, dict) else group[at]
        if not isinstance(inner, dict | list):  # absent, or a plain value that the override turns into a group
            sources.override(path, text)
            inner = {}
        group[at] = inner.copy()
        group = group[at]
    group[_place_in(group, last, key, text)] = value
    sources.override(key, text)
    return expand_short_forms(data)


def _place_in(group: dict[str, Any] | list[Any], name: str, key: str, text: str) -> Any:
    """Return the mapping key or list position that one part of a dotted key refers to."""
    if isinstance(group, dict):
        return name
    if name in (positions := [str(position) for position in range(len(group))]):
        return positions.index(name)
    holder = key.rpartition(".")[0]
    what = f"{shown_key(holder)} is a list of {len(group)}"
    fix = f"name one, such as {shown_key(f'{holder}.0.{name}')}" if not name.isdecimal() else "count from 0"
    raise InputError(Fault(f"override {text}", what, fix, code="SF-CONFIG-OVERRIDE"))
