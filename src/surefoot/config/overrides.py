"""Overrides from the command line: `optim.lr=1e-5`, `adapter=null`, `adapter.targets=[q_proj, v_proj]`.

The value is YAML. A later override beats an earlier one. What is set replaces what the file has under this key.
"""

from __future__ import annotations

from typing import Any

from surefoot.config.schema import RunConfig, ShortForm
from surefoot.config.sources import Sources
from surefoot.config.yaml_reader import parse_value
from surefoot.errors import Fault, InputError

_SHORT_FORMS = {
    name: part.field
    for name, info in RunConfig.model_fields.items()
    for part in info.metadata
    if isinstance(part, ShortForm)
}


def expand_short_forms(data: dict[str, Any]) -> dict[str, Any]:
    """A copy in which `model: path` reads `model: {path: path}`, so that every value stands at its full key."""
    return {
        name: {_SHORT_FORMS[name]: value} if name in _SHORT_FORMS and not isinstance(value, dict) else value
        for name, value in data.items()
    }


def apply_override(data: dict[str, Any], text: str, sources: Sources) -> dict[str, Any]:
    """`data` (short forms expanded) with one override applied; `sources` learns of it. Raises InputError."""
    key, equals, written = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise InputError(Fault(f"override {text}", "is not key=value", "write it like optim.lr=1e-5"))
    value = parse_value(written, f"override {text}")
    data = dict(data)
    group, path = data, ""
    *groups, last = key.split(".")
    for name in groups:
        path = f"{path}.{name}" if path else name
        if not isinstance(group.get(name), dict):  # absent, or a plain value that the override turns into a group
            sources.override(path, text)
            group[name] = {}
        group[name] = dict(group[name])
        group = group[name]
    group[last] = value
    sources.override(key, text)
    return expand_short_forms(data)
