"""Every key of the config as one flat table, read from its JSON Schema.

    all_keys()["optim.lr"].expected    # "a number greater than 0"
    all_keys()["optim.lr"].example     # 0.0002

`surefoot explain` prints these rows and error messages quote them, so the two never disagree. A key inside an item of
a list (`data.train.1.weight`, shown as `data.train[1].weight`) has the row of its key without the number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from surefoot.config.json_schema import config_schema
from surefoot.config.words import in_words

Fragment = dict[str, Any]

_ITEM = re.compile(r"\.(\d+)(?=\.|$)")
_BRACKET = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True)
class Key:
    """path: "optim.lr". expected: what may stand there, in words. example: a value that is accepted.
    item: what each item of a list of fixed words may be, in words; empty for other values. default: None also where the
    key is required. children: paths of the keys of a group; empty for a plain value."""

    path: str
    expected: str
    item: str
    choices: tuple[str, ...]
    help: str
    required: bool
    default: Any
    example: Any
    children: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]


@cache
def all_keys() -> dict[str, Key]:
    """Groups and plain keys by path, in the order of the schema."""
    schema = config_schema()
    return {key.path: key for key in _walk(schema, "", schema["$defs"])}


def schema_key(path: str) -> str:
    """ "data.train.1.weight" -> "data.train.weight" """
    return _ITEM.sub("", path)


def shown_key(path: str) -> str:
    """ "data.train.1.weight" -> "data.train[1].weight", as messages write it"""
    return _ITEM.sub(r"[\1]", path)


def typed_key(text: str) -> str:
    """ "data.train[1].weight" -> "data.train.1.weight"; both may be typed"""
    return _BRACKET.sub(r".\1", text)


def _walk(section: Fragment, group: str, definitions: dict[str, Fragment]) -> Iterator[Key]:
    for name, fragment in section["properties"].items():
        path = f"{group}.{name}" if group else name
        inner = _group_of(fragment, definitions)
        children = tuple(f"{path}.{child}" for child in inner["properties"]) if inner else ()
        default = fragment.get("default")
        yield Key(
            path=path,
            expected=in_words(fragment),
            item=in_words(fragment["items"]) if "enum" in fragment.get("items", {}) else "",
            choices=_choices(fragment),
            help=fragment.get("description", ""),
            required=name in section.get("required", ()),
            default=default,
            example=fragment["examples"][0] if "examples" in fragment else default,
            children=children,
        )
        if inner:
            yield from _walk(inner, path, definitions)


def _group_of(fragment: Fragment, definitions: dict[str, Fragment]) -> Fragment | None:
    for option in fragment.get("anyOf", [fragment]):
        if "$ref" in option:
            return definitions[option["$ref"].rpartition("/")[2]]
    return None


def _choices(fragment: Fragment) -> tuple[str, ...]:
    """The words among the accepted values, or items of a list, for "did you mean"."""
    words: list[str] = []
    for option in fragment.get("anyOf", [fragment.get("items", fragment)]):
        values = option.get("enum", [option["const"]] if "const" in option else [])
        words += [value for value in values if isinstance(value, str)]
    return tuple(words)
