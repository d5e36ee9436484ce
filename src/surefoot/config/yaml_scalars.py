"""Parse unquoted scalars as in YAML 1.2's core schema: `1e-4` is a number, `no` is text, `010` is ten.

Separate from the reader because `surefoot explain` and messages need it, and importing PyYAML takes 0.25 s.
"""

from __future__ import annotations

import re
from typing import Any

_NULL = re.compile(r"null|Null|NULL|~|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


def plain_scalar(text: str) -> Any:
    """Return the value of an unquoted scalar in YAML 1.2's core schema. Raises ValueError for absurdly long numbers."""
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text):
        return int(text[2:], 8)
    if _HEX.fullmatch(text):
        return int(text[2:], 16)
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def scalar_or_text(text: str) -> Any:
    """The same, where a number of absurd length stays text."""
    try:
        return plain_scalar(text)
    except ValueError:
        return text


def is_plain_text(text: str) -> bool:
    """Whether text without quotes is read as that text, and not as a number, a truth or nothing."""
    try:
        return isinstance(plain_scalar(text), str)
    except ValueError:
        return False
