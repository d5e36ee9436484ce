"""Overrides from the command line: `optim.lr=1e-5`, `adapter=null`, `data.train=[a.json, b.csv]`.

`data.train[1].weight=2` (or `data.train.1.weight=2`) reaches into a list.

The value is YAML. A later override beats an earlier one. What is set replaces what the file has under this key.
"""

from __future__ import annotations

from typing import Any

from surefoot.config.keys import shown_key, typed_key
from surefoot.config.schema import RunConfig
from surefoot.config.sources import Sources
from surefoot.config.types import ShortForm
from surefoot.config.yaml_reader import parse_value
from surefoot.system.errors import Fault, InputError

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
