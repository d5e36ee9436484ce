"""Dotted keys in the plain tables of a config: overrides from the command line, and where each key came from.

    optim.lr=1e-5    adapter=null    data.train=[a.json, b.csv]    data.train[1].weight=2

The value of an override is YAML. It replaces what the file has under this key; a later override beats an earlier one.
`Sources` remembers the line of the file or the override that each key came from, for messages.
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
    """Positions of the file, overlaid with the overrides in the order in which they were given."""

    document: Document
    overrides: dict[str, str] = field(default_factory=dict)  # dotted key -> the override as it was typed

    def override(self, key: str, text: str) -> None:
        """From now on `key`, and whatever it holds, comes from the override `text`."""
        self.overrides = {known: typed for known, typed in self.overrides.items() if not known.startswith(f"{key}.")}
        self.overrides[key] = text

    def of_key(self, key: str) -> str:
        """Where a message about the key itself points: "run.yaml:3:1", or the override."""
        return self._where(key, self.document.keys)

    def of_value(self, key: str) -> str:
        return self._where(key, self.document.values)

    def of_group(self, key: str) -> str:
        """Where a message about an absent key points: at the group it belongs to; the file for a top-level key."""
        group = key.rpartition(".")[0]
        if group.rpartition(".")[2].isdecimal():  # an item of a list has no key of its own
            return self.of_value(group)
        return self.of_key(group) if group else self.document.path

    def origin(self, key: str) -> str:
        """ "override" or "file:line", of a key that was given."""
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
        """The one that `key` comes from, which may have replaced a group that the file spells out."""
        return next((self.overrides[name] for name in _upwards(key) if name in self.overrides), None)


def _upwards(key: str) -> Iterator[str]:
    """ "a.b.c", "a.b", "a" """
    while key:
        yield key
        key = key.rpartition(".")[0]


def value_at(config: Mapping[str, Any], key: str) -> Any:
    """Of a dotted key; None where it is not set."""
    for part in key.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return None
        config = config[part]
    return config


def set_at(config: dict[str, Any], key: str, new: Any) -> None:
    """Set a dotted key in place, with the groups above it; None takes it away."""
    *groups, name = key.split(".")
    for group in groups:
        config = config.setdefault(group, {})
    if new is None:
        config.pop(name, None)
    else:
        config[name] = new


def with_settings(given: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """A config as plain values, with these in place of what it has. settings: dotted key -> value."""
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
    """A copy in which `model: path` reads `model: {path: path}`, so that every value stands at its full key.

    Likewise each source in data.train and data.eval; one source is not made a list, so that its keys stay where the
    user wrote them.
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
    """`data` (short forms expanded) with one override applied; `sources` learns of it. Raises InputError."""
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
        held = group.get(at) if isinstance(group, dict) else group[at]
        if not isinstance(held, dict | list):  # absent, or a plain value that the override turns into a group
            sources.override(path, text)
            held = {}
        group[at] = held.copy()
        group = group[at]
    group[_place_in(group, last, key, text)] = value
    sources.override(key, text)
    return expand_short_forms(data)


def _place_in(group: dict[str, Any] | list[Any], name: str, key: str, text: str) -> Any:
    """The key of a group or the position in a list that one part of a dotted key means."""
    if isinstance(group, dict):
        return name
    if name in (positions := [str(position) for position in range(len(group))]):
        return positions.index(name)
    holder = key.rpartition(".")[0]
    what = f"{shown_key(holder)} is a list of {len(group)}"
    fix = f"name one, such as {shown_key(f'{holder}.0.{name}')}" if not name.isdecimal() else "count from 0"
    raise InputError(Fault(f"override {text}", what, fix, code="SF-CONFIG-OVERRIDE"))
