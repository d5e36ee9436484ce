"""A config to start from: every key with its explanation, what is proposed written out, the rest left as comments.

The text follows the schema, so a key that is added there appears here. A line that is commented out shows the default.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from surefoot.config.dump import shown
from surefoot.config.keys import Key, all_keys
from surefoot.config.words import as_yaml

WIDTH = 110  # columns


def starting_config(given: Mapping[str, Any], reasons: Mapping[str, str], schema: str) -> str:
    """YAML. given: values by dotted key, of every required key at least. reasons: why, by dotted key.
    schema: path or address of the JSON Schema, for editors."""
    keys = all_keys()
    parts = [f"# yaml-language-server: $schema={schema}\n# `surefoot explain KEY` says more about each key.\n"]
    parts += ["\n".join(_top(key, given, reasons)) + "\n" for key in keys.values() if not key.group]
    return "\n".join(parts)


def _top(key: Key, given: Mapping[str, Any], reasons: Mapping[str, str]) -> list[str]:
    lines = [*_comment(key.help, ""), *_comment(reasons.get(key.path, ""), "")]
    children = [all_keys()[path] for path in key.children]
    if key.path in given:
        return [*lines, f"{key.name}: {_written(given[key.path])}"]
    if not children:
        return [*lines, f"# {key.name}: {as_yaml(key.default)}"]
    if not any(child.path in given for child in children):
        return [*lines, f"# {key.name}:", *(f"#   {_default(child)}" for child in children)]
    lines.append(f"{key.name}:")
    for child in children:
        lines += _comment(reasons.get(child.path, ""), "  ")
        written = f"{child.name}: {_written(given[child.path])}" if child.path in given else None
        lines.append(f"  {_explained(written, child)}" if written else f"  # {_default(child)}")
    return lines


def _written(value: Any) -> str:
    return shown(value) if isinstance(value, str) else as_yaml(value)


def _default(key: Key) -> str:
    value = key.example if key.required else key.default
    return _explained(f"{key.name}: {as_yaml(value)}", key)


def _explained(line: str, key: Key) -> str:
    room = WIDTH - max(len(line), 24) - 8
    return f"{line:<24}  # {textwrap.shorten(key.help, max(room, 30), placeholder=' …', break_on_hyphens=False)}"


def _comment(text: str, indent: str) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
