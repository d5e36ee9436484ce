"""Dotted keys in plain nested tables, as a config is before it is checked."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any


def value(config: Mapping[str, Any], key: str) -> Any:
    """Of a dotted key; None where it is not set."""
    for part in key.split("."):
        if not isinstance(config, Mapping) or part not in config:
            return None
        config = config[part]
    return config


def put(config: dict[str, Any], key: str, new: Any) -> None:
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
        put(config, key, new)
    return config
