"""Text that a terminal only shows: what files, names, models and other programs say may hold codes that it obeys.

Escape sequences and control characters move the cursor, overwrite what was said, set the title of the window and the
clipboard. The trade-off: marks of direction that languages need stay; those that force one, and so turn a name round,
go.
"""

from __future__ import annotations

import json
import re
from typing import Any

# U+0080 to U+009F are escape sequences of one character; U+202D and U+202E force a direction.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e"
_ESCAPES = re.compile(
    rf"""
      (?:\x1b\[|\x9b)[0-?]*[\ -/]*[@-~]                       # colours, moves of the cursor
    | (?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\|\x9c)  # the window's title, the clipboard
    | \x1b.?
    | [{_CONTROLS}]
    """,
    re.VERBOSE,
)
_IN_JSON = {code: f"\\u{code:04x}" for code in (*range(0x7F, 0xA0), 0x202D, 0x202E)}  # json escapes those below U+0020


def clean(text: str) -> str:
    """Without escape sequences and control characters; every end of a line is a line feed."""
    return _ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def shown_json(value: Any, indent: int | None = 2, **settings: Any) -> str:
    """JSON to read, characters as they are, but for those that `clean` takes away: these are escapes, so that no value
    is lost. settings: of `json.dumps`."""
    return json.dumps(value, indent=indent, ensure_ascii=False, **settings).translate(_IN_JSON)
