"""Format the output of `surefoot explain`: one key in full, or all keys as a table."""

from __future__ import annotations

import textwrap

from surefoot.config.keys import Key, all_keys, as_yaml
from surefoot.config.resume_policy import rule_for
from surefoot.config.suggestions import nearest_key
from surefoot.system.errors import Fault, InputError

WIDTH = 100  # columns of the text


def explain_key(path: str) -> str:
    """Explain one key: purpose, accepted values, default, example, and whether it may change on resume.

    Raises InputError that names the nearest key.
    """
    key = all_keys().get(path)
    if key is None:
        near = nearest_key(path)
        fix = f"did you mean {near.path}?" if near else "`surefoot explain` lists all keys"
        raise InputError(Fault("", f"there is no config key {path}", fix, code="SF-CONFIG-KEY"))
    rows = {
        "expects": key.expected,
        "default": _default(key),
        "example": _in_its_group(key),
        "override": override_of(key),
    }
    if not key.children:
        rule = rule_for(path)
        rows["resume"] = f"{rule.policy}: {rule.why}"
    lines = [key.path, *_wrapped(key.help, "  "), ""]
    lines += [f"  {name:<10}{value}" for name, value in rows.items()]
    if key.children:
        lines += ["", *_table([all_keys()[child] for child in key.children])]
    return "\n".join(lines)


def explain_all() -> str:
    """Return a table of all keys with a plain value: default and the start of the help text."""
    return "\n".join(_table([key for key in all_keys().values() if not key.children]))


def _table(keys: list[Key]) -> list[str]:
    name_width = max(len(key.path) for key in keys) + 2
    default_width = max(len(_default(key)) for key in keys) + 2
    help_width = WIDTH - name_width - default_width
    return [
        f"  {key.path:<{name_width}}{_default(key):<{default_width}}"
        + textwrap.shorten(key.help, help_width, placeholder=" …", break_on_hyphens=False)
        for key in keys
    ]


def _default(key: Key) -> str:
    return "required" if key.required else as_yaml(key.default)


def override_of(key: Key) -> str:
    """Return the override that sets a key to its example; of a list's item, the first one."""
    path = f"{key.group}[0].{key.name}" if key.listed else key.path
    return f"{path}={as_yaml(key.example)}"


def _in_its_group(key: Key) -> str:
    line = f"{key.name}: {as_yaml(key.example)}"
    if not key.group:
        return line
    return f"{key.group}: [{{{line}}}]" if key.listed else f"{key.group}: {{{line}}}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
    )
