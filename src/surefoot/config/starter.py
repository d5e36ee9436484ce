"""Write a config to start from: the most used keys of its stage, grouped and explained, then the names of the others.

Proposed values are written out; other keys are comments with their default. Keys and explanations come from the schema,
so new keys appear here as well. Keys that the stage does not read are left out.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from surefoot.config.dump import shown
from surefoot.config.keys import Key, all_keys, as_yaml
from surefoot.config.method_contradictions import unread_keys

WIDTH = 110  # columns
_GROUPS: Mapping[str, Sequence[str]] = {  # the most used sections and keys, in order
    "What is trained, on what, and where it goes": ("stage", "model", "data", "output"),
    "How it is trained": ("adapter", "reward", "alignment", "duration", "batch", "optim", "precision"),
    "Evaluation, checkpoints and logging": ("eval_every", "checkpoint", "early_stopping", "report_to", "seed"),
}
_WANTED: Mapping[str, Sequence[str]] = {  # section -> its most used keys
    "data": ("train", "eval", "template", "max_length", "packing"),
    "adapter": ("kind", "rank", "alpha", "targets"),
    "reward": ("loss", "center", "init"),
    "alignment": ("loss", "beta", "sft", "good", "bad", "reference"),
    "batch": ("size", "micro"),
    "optim": ("lr", "schedule", "warmup", "weight_decay", "name"),
    "precision": ("compute", "base"),
    "checkpoint": ("every", "keep", "best"),
    "early_stopping": ("patience",),
}


def starting_config(given: Mapping[str, Any], reasons: Mapping[str, str], schema: str) -> str:
    """Return the config as YAML.

    given: dotted key -> value; must include every required key.
    reasons: dotted key -> reason for the value.
    schema: path or URL of the JSON Schema, for editors.
    """
    parts = [f"# yaml-language-server: $schema={schema}\n"]
    keys, unread = all_keys(), unread_keys(given["stage"])
    for title, names in _GROUPS.items():
        parts.append(f"# --- {title} ---\n")
        parts += ["\n".join(_top(keys[name], given, reasons, unread)) + "\n" for name in names if name not in unread]
    parts.append("\n".join(_others(unread)) + "\n")
    return "\n".join(parts)


def _others(unread: frozenset[str]) -> Iterator[str]:
    """Yield comment lines with the names of the keys that are not written."""
    written = {name for names in _GROUPS.values() for name in names}
    top = [key for key in all_keys().values() if not key.group and key.name not in written | unread]
    more = {name: [f"{name}.{child}" for child in _rest(all_keys()[name], unread)] for name in _WANTED}
    names = [*(key.name for key in top), *(child for name in more if name not in unread for child in more[name])]
    yield "# --- Everything else, at its default ---"
    yield from _comment(f"{', '.join(names)}.", "")
    yield "# `surefoot explain` lists all keys with their defaults, `surefoot explain KEY` explains one."


def _rest(section: Key, unread: frozenset[str]) -> list[str]:
    """Return the keys of a section that the stage reads but that are not written."""
    children = [path.rpartition(".")[2] for path in section.children if path not in unread]
    return [name for name in children if name not in _WANTED[section.name]]


def _top(key: Key, given: Mapping[str, Any], reasons: Mapping[str, str], unread: frozenset[str]) -> list[str]:
    lines = [*_comment(key.help, ""), *_comment(reasons.get(key.path, ""), "")]
    if key.path in given:
        return [*lines, f"{key.name}: {_written(given[key.path])}"]
    if not key.children:
        return [*lines, f"# {key.name}: {as_yaml(key.default)}"]
    children = [all_keys()[f"{key.path}.{name}"] for name in _WANTED[key.name] if f"{key.path}.{name}" not in unread]
    if not any(child.path in given for child in children):
        return [*lines, f"# {key.name}:", *(f"#   {line}" for child in children for line in _default(child))]
    lines.append(f"{key.name}:")
    for child in children:
        lines += _comment(reasons.get(child.path, ""), "  ")
        if child.path in given:
            lines += [f"  {line}" for line in _explained(f"{child.name}: {_written(given[child.path])}", child)]
        else:
            *above, last = _default(child)
            lines += [*(f"  {line}" for line in above), f"  # {last}"]
    return lines


def _written(value: Any) -> str:
    return shown(value) if isinstance(value, str) else as_yaml(value)


def _default(key: Key) -> list[str]:
    value = key.example if key.required else key.default
    return _explained(f"{key.name}: {as_yaml(value)}", key)


def _explained(line: str, key: Key) -> list[str]:
    """Append as many whole sentences of the key's help as fit; if not even the first fits, put it above."""
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
