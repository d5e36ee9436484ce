"""Messages of libraries without what looks like a key or a password.

By shape, since nobody tells which text is secret. In doubt a harmless word goes: what is lost can be read in the
library's own log, and what was shown once stays in logs and bug reports.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_OF_TEXT = ("bos", "eos", "pad", "unk", "sep", "cls", "mask", "eot", "image", "stop")  # tokens that are no secret
_SECRET = re.compile(
    r"""
      (?<=://)[^/@\s]+(?=@)                                                              # user:password@host
    | (?:api[_-]?key|OF_TEXT token|secret|password|authorization)["']?\s*[=:]\s*["']?
      (?:(?:bearer|basic)\s+)?[^\s"'&,;]+                                                # token=…, Authorization: …
    | \bbearer\s+[\w.~+/=-]{8,}
    | \bbasic\s+(?=\S*[\d=])[\w+/=]{8,}
    | \beyJ[\w-]{8,}(?:\.[\w-]+)*                                                        # JSON web tokens
    | \b(?-i:hf_|sk-|gh[a-z]_|wandb_v\d+_)[\w-]{8,}
    | \b[0-9a-f]{32,}\b
    | \b(?=[\w-]*\d)(?=[\w-]*[a-z])[\w-]{32,}                                            # long, letters and digits
    """.replace("OF_TEXT", "".join(f"(?<!{kind}_)" for kind in _OF_TEXT)),
    re.VERBOSE | re.IGNORECASE,
)

_SECRET_NAME = re.compile(
    r"(?:hub|auth|access|hf|ms|om|user|git(?:hub)?|api|bearer)_?token$|^token$|api_?key$|secret|passw|webhook|credential"
    r"|private_?key|_TOKEN$",
    re.IGNORECASE,
)
_TOKENS_OF_TEXT = re.compile(rf"(?:{'|'.join(_OF_TEXT)})_token$", re.IGNORECASE)


_SHAPES = re.compile(
    r"(?<=://)[^/@\s]+(?=@)|\bbearer\s+[\w.~+/=-]{8,}|\beyJ[\w-]{8,}(?:\.[\w-]+)+|\b(?-i:hf_|sk-|gh[a-z]_|wandb_v\d+_)[\w-]{8,}",
    re.IGNORECASE,
)
# Whole names only, never tried again from their middle: a line of megabytes would take hours.
_NAMED = re.compile(r"(?<![\w.-])([\w.-]++)([\"']?\s*[=:]\s*)(\S.*)")
_GIVEN = re.compile(r"(?<![\w.-])([\w.-]++)(=[\"']?)([^\s\"']+)")


def hides(name: str) -> bool:
    """Whether a setting of this name holds a secret: a key, a password, an address that lets its owner in."""
    return _SECRET_NAME.search(name) is not None and _TOKENS_OF_TEXT.search(name) is None


def redacted(text: str) -> str:
    """The text with an ellipsis for each secret."""
    return _SECRET.sub("…", text)


def veiled(text: str) -> str:
    """Without what is a secret beyond doubt: NAME=value of a name that hides one, and tokens by their shape. Hashes and
    long names stay, which a message is about."""

    def value(found: re.Match[str]) -> str:
        return f"{found[1]}{found[2]}…" if _hides_any(found[1]) else found[0]

    return _SHAPES.sub("…", _GIVEN.sub(value, text))


def veiled_line(text: str) -> str:
    """A line of a file, of the same width: also what stands behind `name:` goes, up to the end of the line."""

    shown, position = text, 0
    while found := _NAMED.search(text, position):
        position = found.start(3)
        if _hides_any(found[1]):
            shown = text[:position] + _blank(found[3])
            break
    return _SHAPES.sub(lambda found: _blank(found[0]), shown)


def veiled_words(words: Sequence[str]) -> list[str]:
    """A command without the values of flags whose names hide them."""
    shown: list[str] = []
    for word in words:
        before = shown[-1] if shown else ""
        hidden = before.startswith("-") and "=" not in before and not word.startswith("-") and _hides_any(before)
        shown.append("…" if hidden else veiled(word))
    return shown


def veiled_value(value: Any) -> Any:
    """A value of settings, with an ellipsis for what lies under a name that hides it."""
    if isinstance(value, dict):
        return {name: "…" if held and hides(str(name)) else veiled_value(held) for name, held in value.items()}
    if isinstance(value, list | tuple):
        return [veiled_value(one) for one in value]
    return veiled(value) if isinstance(value, str) else value


def _hides_any(name: str) -> bool:
    return hides(name.lstrip("-").replace("-", "_").rpartition(".")[2])


def _blank(text: str) -> str:
    return f"…{' ' * (len(text) - 1)}"
