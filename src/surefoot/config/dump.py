"""Write a config as YAML that reads back to an equal config, here and in tools that still follow YAML 1.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from surefoot.config.schema import RunConfig
from surefoot.config.yaml_scalars import is_plain_text

_WIDTH = 1 << 30  # characters: no value is wrapped


class _Dumper(yaml.SafeDumper):
    """PyYAML quotes text that YAML 1.1 would not read as text (`no`, `12:30`); this adds YAML 1.2 (`1e4`, `0o7`)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    breaks = not value.isprintable()  # otherwise it would span lines, and a comment would follow on another line
    style = '"' if breaks else None if is_plain_text(value) else "'"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def plain_config(config: RunConfig) -> dict[str, Any]:
    """Return the config as plain dicts, lists and scalars with defaults, as `read_yaml` reads the saved file."""
    return config.model_dump(mode="json")


def dump_config(config: RunConfig) -> str:
    """Return the whole config as YAML, defaults included, in the order of the schema."""
    return dump_plain(plain_config(config))


def dump_plain(data: Mapping[str, Any]) -> str:
    """Return plain values as YAML, in their order."""
    return yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=_WIDTH
    )


def shown(value: Any) -> str:
    """Format a value of a plain config as YAML on one line."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=True, width=_WIDTH)
    return text.removesuffix("\n").removesuffix("\n...")
