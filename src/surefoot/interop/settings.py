"""What is known of one setting of another tool, as data: its default there, and what becomes of it here.

    carried("lora_rank", 8, "adapter.rank")              one key, the value as it is
    joint("bf16", False, ("precision.compute",), "…")    a rule reads it together with others
    listed("use_fast_tokenizer", True, "…")              no counterpart, and nothing is lost by that
    refused("use_badam", False, "…", "…")                anything but its default asks for what surefoot lacks

The same rows translate, fill the tables of docs/dialects-settings.md and answer `TOOL --help`, so `about` says what a
reader needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.interop.words import plain_truth
from surefoot.planning.disk import LEAST_KEPT

Kind = Literal["carried", "joint", "listed", "refused"]
Read = Callable[[Any], Any]  # the value as given -> as meant; ValueError says what was expected

# Rows of several examples, by which other tools count a batch. surefoot's own data.packing changes no step.
PACKED = "a batch counts packed rows there and examples here, so the steps would not be the same"
UNPACKED = "leave it out, and give the batch in examples: data.packing packs by itself where that is faster"

ALL_POSITIONS = "model"  # of data.max_length, where a tool cuts nothing
NO_LIMIT = "no limit there; a longer example than the model has positions is cut here"

AT_LEAST = f"{LEAST_KEPT} stay at least, as the newest may be damaged"  # of checkpoints


class Refusal(Exception):
    """A value that asks for what surefoot cannot give. what: why not; fix: what to do instead."""

    def __init__(self, what: str, fix: str = ""):
        super().__init__(what)
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class Row:
    """One setting of another tool.

    name, default: the tool's.
    kind: what becomes of it, as the functions below say.
    keys: keys of ours that it decides.
    type: checks and reads the value; ValueError says what was expected.
    convert: its value -> ours, or Refusal.
    about: why, as the end of a sentence.
    fix: what to do instead, where it is refused.
    same: values that mean the same as the default.
    secret: shown nowhere.
    null: what a null written out means; None: the default stands.
    """

    name: str
    default: Any
    kind: Kind
    keys: tuple[str, ...] = ()
    type: Read | None = None
    convert: Callable[[Any], Any] | None = None
    about: str = ""
    fix: str = ""
    same: tuple[Any, ...] = ()
    secret: bool = False
    null: Any = None

    @property
    def when_null(self) -> Any:
        """What a null written out means. A switch that is on by default is off then: null is false to Python."""
        return False if self.null is None and self.default is True else self.null

    @property
    def is_text(self) -> bool:
        """Whether its value is what was written, digits or not."""
        return self.type is text or (self.type is None and isinstance(self.default, str))


def carried(
    name: str,
    default: Any,
    key: str,
    convert: Callable[[Any], Any] | None = None,
    about: str = "",
    *,
    type: Any = None,
    null: Any = None,
) -> Row:
    return Row(name, default, "carried", (key,), type or type_of(default), convert, about, null=null)


def joint(
    name: str, default: Any, keys: Sequence[str] = (), about: str = "", *, type: Read | None = None, null: Any = None
) -> Row:
    return Row(name, default, "joint", tuple(keys), type or type_of(default), None, about, null=null)


def listed(name: str, default: Any, about: str, *, secret: bool = False) -> Row:
    return Row(name, default, "listed", about=about, secret=secret)


def all_listed(about: str, **defaults: Any) -> tuple[Row, ...]:
    """Settings without counterpart for the same reason, in this order."""
    return tuple(listed(name, default, about) for name, default in defaults.items())


def refused(name: str, default: Any, about: str, fix: str = "", *, same: Sequence[Any] = ()) -> Row:
    return Row(name, default, "refused", (), type_of(default), None, about, fix, tuple(same))


def type_of(default: Any) -> Read | None:
    """The check that a default's type suggests; None for text and for what has no default."""
    if isinstance(default, bool):
        return truth
    if isinstance(default, int):
        return whole
    return number if isinstance(default, float) else None


def truth(value: Any) -> bool:
    if (found := plain_truth(value)) is None:
        raise ValueError("true or false")
    return found


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a number")
    return value


def whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value != int(value):
        raise ValueError("a whole number")
    if abs(value) >= 2**63:  # twice 1e308 would be no number any more
        raise ValueError("a whole number that a machine can hold")
    return int(value)


def text(value: Any) -> str:
    if isinstance(value, list | dict | bool):
        raise ValueError("a text")
    return str(value)


def group(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a group of settings")
    return value


def file_or_group(value: Any) -> str | dict[str, Any]:
    if not isinstance(value, str | dict):
        raise ValueError("a file or a group of settings")
    return value


def names(value: Any) -> list[str]:
    """`a,b`, `a, b` or a list; blanks around a name go."""
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def by_name(*rows: Row) -> dict[str, Row]:
    """The table of a tool's settings; of several rows of one name the last one."""
    return {row.name: row for row in rows}


HELP = ("--help", "-h")


def asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in HELP for word in arguments)


def described(rows: Mapping[str, Row]) -> list[tuple[str, str]]:
    """(flag with its default, what becomes of it), in the tool's order."""
    return [(f"--{row.name} [{_shown(row.default)}]", _outcome(row)) for row in rows.values()]


def _outcome(row: Row) -> str:
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
