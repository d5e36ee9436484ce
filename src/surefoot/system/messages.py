"""Text of messages: lists and counts, sizes in bytes, "did you mean", and untrusted text without terminal codes.

    f"{counted(3, 'file')}: {first_few(names, 2)}"    # "3 files: a.json, b.json and 1 more"
    size_text(3 << 30)                                 # "3.0 GiB"
    nearest_word("adamv", ["adamw", "sgd"])            # "adamw"
    clean(line)                                        # no escape sequences, no control characters

Names of files, configs and generated text may contain escape sequences that move the cursor, overwrite text, or set the
window's title and the clipboard. The trade-off: direction marks that languages need are kept; those that force a
direction, and so reverse a name, are removed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from typing import Any


def first_few(names: Sequence[object], most: int) -> str:
    """Join names by commas: `3, 17, 20 and 5 more`.

    names: all of them, in order.
    most: how many are written out.
    """
    shown = ", ".join(map(str, names[:most]))
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def counted(number: int, noun: str) -> str:
    """Format a number with its noun: `1 step`, `1,200 steps`.

    number: the count.
    noun: the singular of a noun whose plural takes an s.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def was(number: int) -> str:
    """Return "was" for 1, else "were": the verb after `counted`."""
    return "was" if number == 1 else "were"


KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40


def size_text(size: int) -> str:
    """Format a size: 70.2 GiB, 320 MiB, 1.5 MiB, 12 KiB, 999 B.

    size: bytes; a negative size keeps its sign.
    """
    if size < 0:
        return f"-{size_text(-size)}"
    for unit, factor in (("TiB", TIB), ("GiB", GIB)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    for unit, factor in (("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{size / factor:.0f} {unit}" if size >= 10 * factor else f"{size / factor:.1f} {unit}"
    return f"{size} B"


CLOSE = 0.65  # similarity (0 to 1) from which a name is suggested
MOST = 100  # unknown names of one file that get a suggestion: each takes milliseconds, and a file may hold thousands


def nearest_words(word: str, choices: Iterable[str], most: int, least: float = CLOSE) -> list[str]:
    """Return the choices most similar to `word`, closest first.

    word: the unknown name.
    choices: the known names.
    most: maximum number of results.
    least: minimum similarity (0 to 1).
    """
    scored = [(likeness(plain_name(word), plain_name(choice)), choice) for choice in choices]
    close = sorted((pair for pair in scored if pair[0] >= least), key=lambda pair: -pair[0])
    return [choice for _, choice in close[:most]]


def nearest_word(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice most similar to `word`, or None if none is close."""
    return next(iter(nearest_words(word, choices, 1)), None)


def did_you_mean(word: str, choices: Iterable[str], otherwise: str) -> str:
    """Return the advice for an unknown name: the choice most similar to it, or `otherwise` if none is close."""
    near = nearest_word(word, choices)
    return f"did you mean {near}?" if near else otherwise


def likeness(a: str, b: str) -> float:
    """Similarity of two names: 1 for equal names, 0 for nothing in common; swapped letters cost little."""
    if sorted(a) == sorted(b):
        return 1.0 if a == b else 0.9
    return SequenceMatcher(None, a, b).ratio()


def plain_name(name: str) -> str:
    """Lower case with underscores for dashes, since people write both."""
    return name.lower().replace("-", "_")


# U+0080 to U+009F are escape sequences of one character; U+202D and U+202E force a direction.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e"
_ESCAPES = re.compile(
    rf"""
      (?:\x1b\[|\x9b)[0-?]*[\ -/]*[@-~]                       # colors, moves of the cursor
    | (?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\|\x9c)  # the window's title, the clipboard
    | \x1b.?
    | [{_CONTROLS}]
    """,
    re.VERBOSE,
)
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x202D, 0x202E)}  # json escapes those below U+0020


def clean(text: str) -> str:
    """Strip terminal escape sequences and control characters from untrusted text; line ends become line feeds."""
    if text.isprintable():  # fast path: nearly all text is, and table cells are cleaned repeatedly
        return text
    return _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def shown_json(value: Any, indent: int | None = 2, **settings: Any) -> str:
    """Readable JSON with Unicode characters, except those that `clean` would remove: these are escaped, so that no
    value is lost. settings: of `json.dumps`."""
    return json.dumps(value, indent=indent, ensure_ascii=False, **settings).translate(_IN_JSON)
