"""Read every config key from the JSON Schema into a flat table, with its accepted values in words.

    all_keys()["optim.lr"].expected    # "a number greater than 0"
    all_keys()["optim.lr"].example     # 0.0002
    config_schema()                    # JSON Schema (draft 2020-12) for editors

`surefoot explain` prints these rows and error messages quote them, so the two always agree. Editors with the schema
accept exactly what a run accepts, except for two things that only a run checks: whether files exist, and that "1.5
steps" is not a whole number of steps. A key inside a list item (`data.train.1.weight`, shown as
`data.train[1].weight`) has the row of the key without the number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from surefoot.config.schema import RunConfig
from surefoot.config.types import Duration
from surefoot.config.yaml_scalars import is_plain_text

Fragment = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
LONGEST = 40  # characters of a value in a message


class _Generator(GenerateJsonSchema):
    """JSON Schema without titles that repeat keys, and with durations as text."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def encode_default(self, dft: Any) -> Any:
        return str(dft) if isinstance(dft, Duration) else super().encode_default(dft)


@cache
def config_schema() -> dict[str, Any]:
    """Return the JSON Schema. The dictionary is shared: do not change it."""
    schema = RunConfig.model_json_schema(schema_generator=_Generator)
    return {"$schema": DIALECT, **schema, "title": "surefoot config"}


_ITEM = re.compile(r"\.(\d+)(?=\.|$)")
_BRACKET = re.compile(r"\[(\d+)\]")


@dataclass(frozen=True)
class Key:
    """One key of the config.

    path: dotted path such as "optim.lr".
    expected: accepted values in words.
    example: an accepted value.
    item: accepted items of a list, in words; empty if it takes no list.
    default: None also if the key is required.
    children: paths of a group's keys; empty for a plain value.
    listed: whether its group is an item of a list, and nothing else may stand there.
    """

    path: str
    expected: str
    item: str
    choices: tuple[str, ...]
    help: str
    required: bool
    default: Any
    example: Any
    children: tuple[str, ...]
    listed: bool = False

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def group(self) -> str:
        return self.path.rpartition(".")[0]


@cache
def all_keys() -> dict[str, Key]:
    """Return groups and plain keys by path, in the order of the schema."""
    schema = config_schema()
    return {key.path: key for key in _walk(schema, "", schema["$defs"])}


def schema_key(path: str) -> str:
    """Drop list positions: "data.train.1.weight" -> "data.train.weight"."""
    return _ITEM.sub("", path)


def shown_key(path: str) -> str:
    """Format a key for messages: "data.train.1.weight" -> "data.train[1].weight"."""
    return _ITEM.sub(r"[\1]", path)


def typed_key(text: str) -> str:
    """Normalize a key as typed: "data.train[1].weight" -> "data.train.1.weight"."""
    return _BRACKET.sub(r".\1", text)


def _walk(section: Fragment, group: str, definitions: dict[str, Fragment], *, listed: bool = False) -> Iterator[Key]:
    for name, fragment in section["properties"].items():
        path = f"{group}.{name}" if group else name
        alone = _group_of(fragment, definitions)
        inner = alone or _group_of(fragment.get("items", {}), definitions)
        children = tuple(f"{path}.{child}" for child in inner["properties"]) if inner else ()
        default = fragment.get("default")
        yield Key(
            path=path,
            expected=in_words(fragment),
            item=_item(fragment),
            choices=_choices(fragment),
            help=fragment.get("description", ""),
            required=name in section.get("required", ()),
            default=default,
            example=fragment["examples"][0] if "examples" in fragment else default,
            children=children,
            listed=listed,
        )
        if inner:
            yield from _walk(inner, path, definitions, listed=alone is None)


def _group_of(fragment: Fragment, definitions: dict[str, Fragment]) -> Fragment | None:
    for option in fragment.get("anyOf", [fragment]):
        if "$ref" in option:
            return definitions[option["$ref"].rpartition("/")[2]]
    return None


def _choices(fragment: Fragment) -> tuple[str, ...]:
    """Return accepted strings, also of list items, for "did you mean"."""
    words: list[str] = []
    for option in fragment.get("anyOf", [fragment.get("items", fragment)]):
        values = option.get("enum", [option["const"]] if "const" in option else [])
        words += [value for value in values if isinstance(value, str)]
    return tuple(words)


def in_words(fragment: Fragment) -> str:
    """Describe what a fragment of the JSON Schema accepts: "a whole number of at least 1"."""
    if "anyOf" in fragment:
        words = ["a list of these" if "anyOf" in one.get("items", {}) else in_words(one) for one in fragment["anyOf"]]
        options = list(dict.fromkeys(words))
        return ", or ".join(options) if any(" or " in option for option in options) else _either(options)
    if "$ref" in fragment:
        return "a group of keys"
    if "enum" in fragment:
        return _either([value for value in fragment["enum"] if isinstance(value, str)])  # true means on
    if "const" in fragment:
        return _scalar(fragment["const"])
    match fragment["type"]:
        case "integer":
            return "a whole number" + _bounds(fragment)
        case "number":
            return "a number" + _bounds(fragment)
        case "boolean":
            return "true or false"
        case "array":
            return _list(fragment)
        case "object":
            return "names for names, such as " + as_yaml(fragment["examples"][0])
        case "string" if "pattern" in fragment:
            return str(fragment["title"])
        case "string":
            return "text"
        case kind:
            return kind


def shown(value: Any) -> str:
    """Format a value with its kind for a message: `'eight' (text)`."""
    text = repr(value) if isinstance(value, str) else as_yaml(value)
    if len(text) > LONGEST:
        text = text[: LONGEST - 1] + "…"
    return f"{text} ({kind_of(value)})" if value is not None else "nothing"


def kind_of(value: Any) -> str:
    match value:
        case bool():
            return "true/false"
        case int():
            return "a whole number"
        case float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "a group of keys"


def as_yaml(value: Any) -> str:
    """Format a value on one line, as in a config."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_yaml(item) for item in value) + "]"
    return _scalar(value)


_MARKS = re.compile(r"[{}\[\],]|: ")  # mean something inside a list or mapping on one line


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        plain = value and is_plain_text(value) and not _MARKS.search(value)
        return value if plain else "'{}'".format(value.replace("'", "''"))
    return _number(value) if isinstance(value, float) else json.dumps(value)


def _number(value: float) -> str:
    """Format a number as the shorter of 0.0002 and 2e-4; whole numbers below a million are unchanged."""
    plain = repr(value)
    if value.is_integer() and abs(value) < 1e6:
        return plain
    digits, _, exponent = f"{value:e}".partition("e")
    short = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}" if exponent else plain
    return short if float(short) == value and len(short) < len(plain) else plain


def _bounds(fragment: Fragment) -> str:
    whole = fragment["type"] == "integer"
    least, most = fragment.get("minimum"), fragment.get("maximum")
    above, below = fragment.get("exclusiveMinimum"), fragment.get("exclusiveMaximum")
    if whole and below is not None:
        most, below = below - 1, None
    parts = []
    if least is not None:
        parts.append(f"of at least {_scalar(least)}")
    if above is not None:
        parts.append(f"greater than {_scalar(above)}")
    if most is not None:
        parts.append(f"at most {_scalar(most)}")
    if below is not None:
        parts.append(f"less than {_scalar(below)}")
    return " " + " and ".join(parts) if parts else ""


def _list(fragment: Fragment) -> str:
    if "prefixItems" in fragment:
        items = fragment["prefixItems"]
        return f"a list of {len(items)} values, each {in_words(items[0])}"
    item = in_words(fragment["items"])
    if "anyOf" in fragment["items"]:
        return f"a list, each {item}"
    if "enum" in fragment["items"]:
        return f"a list of {item}"
    return "a list of " + {"text": "names", "a group of keys": "groups of keys"}.get(item, "values")


def _item(fragment: Fragment) -> str:
    for option in fragment.get("anyOf", [fragment]):
        if items := option.get("items") or option.get("prefixItems", [None])[0]:
            return in_words(items)
    return ""


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else ", ".join(options[:-1]) + " or " + options[-1]
