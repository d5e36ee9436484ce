"""Describe one setting of another tool as data: its default there, and what becomes of it here.

    carried("lora_rank", 8, "adapter.rank")              one key, same value
    joint("bf16", False, ("precision.compute",), "…")    a rule reads it with other settings
    listed("use_fast_tokenizer", True, "…")              no counterpart, and none is needed
    refused("use_badam", False, "…", "…")                only its default is supported

The same rows drive the translation, the tables of docs/dialects-settings.md and `TOOL --help`, so `about` is written
for all three.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from surefoot.interop.backward import Back
from surefoot.interop.words import plain_truth
from surefoot.planning.disk import LEAST_KEPT

Kind = Literal["carried", "joint", "listed", "refused"]
Read = Callable[[Any], Any]  # given value -> checked value; ValueError says what was expected

ALL_POSITIONS = "model"  # data.max_length for a tool that truncates nothing
OWN_KERNELS = "affects speed only; surefoot chooses its own kernels"
OF_THE_HUB = "name a folder or hub id"
NO_LIMIT = "no limit there; examples longer than the model's positions are truncated here"

AT_LEAST = f"at least {LEAST_KEPT} checkpoints are kept, as the newest may be damaged"


class Refusal(Exception):
    """A value that surefoot does not support. what: why not; fix: what to do instead."""

    def __init__(self, what: str, fix: str = ""):
        super().__init__(what)
        self.what, self.fix = what, fix


@dataclass(frozen=True)
class Row:
    """One setting of another tool.

    name, default: the tool's name and default.
    kind: what becomes of it; see the functions below.
    keys: surefoot keys that it decides.
    type: checks and converts the value; raises ValueError with what was expected.
    convert: the tool's value -> surefoot's value; raises Refusal.
    about: the reason, as the end of a sentence.
    fix: what to do instead, if it is refused.
    same: values equivalent to the default.
    secret: whether to hide the value everywhere.
    required: what to do if it is not given; empty for a setting that may be left out.
    null: meaning of an explicit null; None keeps the default.
    back: a surefoot config -> the value of this setting, None to leave it out. Without it: the value of the only key.
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
    back: Back | None = None
    required: str = ""

    @property
    def when_null(self) -> Any:
        """Meaning of an explicit null. It turns a switch off that is on by default, since None is false in Python."""
        return False if self.null is None and self.default is True else self.null

    @property
    def is_text(self) -> bool:
        """Whether the value is text even if it consists of digits."""
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
    back: Back | None = None,
    required: str = "",
) -> Row:
    read = type or type_of(default)
    return Row(name, default, "carried", (key,), read, convert, about, null=null, back=back, required=required)


def joint(
    name: str,
    default: Any,
    keys: Sequence[str] = (),
    about: str = "",
    *,
    type: Read | None = None,
    null: Any = None,
    back: Back | None = None,
    required: str = "",
) -> Row:
    read = type or type_of(default)
    return Row(name, default, "joint", tuple(keys), read, None, about, null=null, back=back, required=required)


def listed(name: str, default: Any, about: str, *, secret: bool = False) -> Row:
    return Row(name, default, "listed", about=about, secret=secret)


def all_listed(about: str, names: str = "", **defaults: Any) -> tuple[Row, ...]:
    """Return listed rows that share one reason.

    names: settings without a default, separated by blanks. defaults: setting name -> default.
    """
    given = dict.fromkeys(names.split()) | defaults
    return tuple(listed(name, default, about) for name, default in given.items())


def refused(name: str, default: Any, about: str, fix: str = "leave it out", *, same: Sequence[Any] = ()) -> Row:
    return Row(name, default, "refused", (), type_of(default), None, about, fix, tuple(same))


def type_of(default: Any) -> Read | None:
    """Return the check for the type of a default; None for text and for settings without a default."""
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
    if isinstance(value, str) and re.fullmatch(r"[0-9]+(_[0-9]+)+", value):
        value = int(value)  # YAML 1.1, which these tools read, has 500_000 for a number
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value != int(value):
        raise ValueError("a whole number")
    if abs(value) >= 2**63:  # larger ones overflow to infinity when multiplied
        raise ValueError("a whole number below 2**63")
    return int(value)


def text(value: Any) -> str:
    if isinstance(value, list | dict | bool):
        raise ValueError("a text")
    return str(value)


def first_values(value: Any) -> bool | str:
    """PEFT's init_lora_weights."""
    if not isinstance(value, bool | str):
        raise ValueError("true, or a word such as pissa")
    return value


def group(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a group of settings")
    return value


def file_or_group(value: Any) -> str | dict[str, Any]:
    if not isinstance(value, str | dict):
        raise ValueError("a file or a group of settings")
    return value


def hub_revision(value: str) -> str | None:
    return None if value == "main" else value


def names(value: Any) -> list[str]:
    """Split `a,b`, `a, b` or a list into names without surrounding blanks."""
    items = value if isinstance(value, list) else str(value).split(",")
    return [str(item).strip() for item in items if str(item).strip()]


def one_of(table: Mapping[Any, Any], what: str = "surefoot has no {}") -> Callable[[Any], Any]:
    """Return the conversion by a table, which refuses other words. None, for a setting that is not given, stays."""

    def convert(value: Any) -> Any:
        if value is not None and (isinstance(value, list | dict) or value not in table):
            raise Refusal(what.format(value), f"choose from {', '.join(map(str, table))}")
        return table.get(value)

    return convert


def by_name(*rows: Row) -> dict[str, Row]:
    """Return rows by setting name; the last of several rows of one name wins."""
    return {row.name: row for row in rows}


def switches(rows: Mapping[str, Row]) -> frozenset[str]:
    """Return the names of the settings that are true or false, whose flags may have no value."""
    return frozenset(name for name, row in rows.items() if row.type is truth or isinstance(row.default, bool))


HELP = ("--help", "-h")


def asks_for_help(arguments: Sequence[str]) -> bool:
    return any(word in HELP for word in arguments)


def described(rows: Mapping[str, Row]) -> list[tuple[str, str]]:
    """Return (flag with its default, what becomes of it) for each row, in the tool's order."""
    return [(f"--{row.name} [{_shown(row.default)}]", _outcome(row)) for row in rows.values()]


def _outcome(row: Row) -> str:
    keys = ", ".join(row.keys)
    words = {
        "carried": f"becomes {keys}",
        "joint": f"decides {keys}, with other settings" if keys else "carried over",
        "listed": "no effect here",
        "refused": "only the default is supported",
    }[row.kind]
    return f"{words}: {row.about}" if row.about else words


def _shown(default: Any) -> str:
    if isinstance(default, tuple) and default:
        default = default[0]
    return "none" if default in (None, "", ()) else str(default)
