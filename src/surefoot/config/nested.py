"""Dotted keys in plain nested tables, as a config is before it is checked."""

from __future__ import annotations

from collections.abc import Mapping
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
