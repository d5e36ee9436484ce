"""A config to start from: every key with its explanation, what is proposed written out, the rest left as comments.

The text follows the schema, so a key that is added there appears here. A line that is commented out shows the default.
"""

from __future__ import annotations

import re
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
        return [*lines, f"# {key.name}:", *(f"#   {line}" for child in children for line in _default(child))]
    lines.append(f"{key.name}:")
    for child in children:
        lines += _comment(reasons.get(child.path, ""), "  ")
        if child.path in given:
            lines += [f"  {line}" for line in _explained(f"{child.name}: {_written(given[child.path])}", child)]
        else:
            lines += [f"  # {line}" for line in _default(child)]
    return lines


def _written(value: Any) -> str:
    return shown(value) if isinstance(value, str) else as_yaml(value)


def _default(key: Key) -> list[str]:
    value = key.example if key.required else key.default
    return _explained(f"{key.name}: {as_yaml(value)}", key)


def _explained(line: str, key: Key) -> list[str]:
    """The line with as many whole sentences of the key's help behind it as have room; where not even the first has,
    that stands above."""
    room = WIDTH - max(len(line), 24) - 8
    text, *more = re.split(r"(?<=\.)\s+(?=[A-Z])", " ".join(key.help.split()))
    if len(text) > room:
        return [*_comment(text, "", WIDTH - 4), line]
    for sentence in more:
        if len(text) + 1 + len(sentence) > room:
            break
        text += f" {sentence}"
    return [f"{line:<24}  # {text}"]


def _comment(text: str, indent: str, width: int = WIDTH) -> list[str]:
    start = f"{indent}# "
    return textwrap.wrap(text, width, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)
