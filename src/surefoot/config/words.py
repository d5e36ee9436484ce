"""Puts schemas and values into plain words: what is expected, what was given."""

from __future__ import annotations

import json
from typing import Any

from surefoot.config.yaml_scalars import is_plain_text

LONGEST = 40  # characters of a value that a message quotes


def in_words(fragment: dict[str, Any]) -> str:
    """What a fragment of the config's JSON Schema accepts: "a whole number of at least 1"."""
    if "anyOf" in fragment:
        options = list(dict.fromkeys(in_words(option) for option in fragment["anyOf"]))
        return ", or ".join(options) if any(" or " in option for option in options) else _either(options)
    if "$ref" in fragment:
        return "a group of keys"
    if "enum" in fragment:
        return _either([value for value in fragment["enum"] if isinstance(value, str)])  # true stands for on
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
            return "a length such as 200 steps, 3 epochs or 1e6 tokens"
        case "string":
            return "text"
        case kind:
            return kind


def shown(value: Any) -> str:
    """A value as a message quotes it, with its kind: `'eight' (text)`."""
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
    """A value on one line, as the config would have it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_yaml(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return value if value and is_plain_text(value) else f"'{value}'"
    return _number(value) if isinstance(value, float) else json.dumps(value)


def _number(value: float) -> str:
    """The shorter of 0.0002 and 2e-4; whole numbers below a million as they are."""
    plain = repr(value)
    if value.is_integer() and abs(value) < 1e6:
        return plain
    digits, _, exponent = f"{value:e}".partition("e")
    short = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}" if exponent else plain
    return short if float(short) == value and len(short) < len(plain) else plain


def _bounds(fragment: dict[str, Any]) -> str:
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


def _list(fragment: dict[str, Any]) -> str:
    if "prefixItems" in fragment:
        items = fragment["prefixItems"]
        return f"a list of {len(items)} values, each {in_words(items[0])}"
    if "anyOf" in fragment["items"]:
        return "a list of these"
    if "enum" in fragment["items"]:
        return f"a list of {in_words(fragment['items'])}"
    return "a list of " + {"text": "names"}.get(in_words(fragment["items"]), "values")


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else ", ".join(options[:-1]) + " or " + options[-1]
