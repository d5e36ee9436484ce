"""What `TOOL --help` prints: every flag of another tool, its default, and what becomes of it.

The rows are those that translate, so the help cannot say anything else than what happens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.interop.rows import Row

HELP = ("--help", "-h")


def asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in HELP for word in arguments)


def described(rows: Mapping[str, Row]) -> list[tuple[str, str]]:
    """(flag with its default, what becomes of it), in the tool's order."""
    return [(f"--{row.name} [{_shown(row.default)}]", _fate(row)) for row in rows.values()]


def _fate(row: Row) -> str:
    keys = ", ".join(row.keys)
    words = {
        "carried": f"becomes {keys}",
        "joint": f"decides {keys}, with others" if keys else "carried over",
        "listed": "no effect here",
        "refused": "refused, but for its default",
    }[row.kind]
    return f"{words}: {row.about}" if row.about else words


def _shown(default: Any) -> str:
    if isinstance(default, tuple) and default:
        default = default[0]
    return "none" if default in (None, "", ()) else str(default)
