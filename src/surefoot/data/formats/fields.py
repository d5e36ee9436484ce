"""Reading a record's fields strictly: what is absent, null, of another type or empty is a fault with the field's name.

A field that may be absent may be null as well: tables (CSV, Parquet) have no other way to leave one out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from surefoot.data.formats.conversation import Conversation
from surefoot.data.json_rows import read_value
from surefoot.data.rows import Row, kind_of
from surefoot.errors import Fault, InputError
from surefoot.few import first_few
from surefoot.nearest import nearest_words

_SHOWN = 8  # kinds of fault, and rows with the same one, listed before the rest is only counted

Item = TypeVar("Item", Row, Conversation)
Result = TypeVar("Result")


class RowFault(Exception):
    """What is wrong with one row; the caller knows the file."""

    def __init__(self, what: str, fix: str = ""):
        super().__init__(what)
        self.what, self.fix = what, fix


def each_row(items: Iterable[Item], do: Callable[[Item], Result], name: str) -> list[Result]:
    """`do` for every row of the file `name`. RowFaults become one InputError: each kind of fault once, by its first row
    and the numbers of others; the first kinds in full, rows with others counted."""
    results: list[Result] = []
    found: dict[tuple[str, str], list[Item]] = {}
    for item in items:
        try:
            results.append(do(item))
        except RowFault as fault:
            found.setdefault((fault.what, fault.fix), []).append(item)
    if found:
        kinds = list(found.items())
        faults = [
            Fault(f"{name}:{rows[0].line}", f"row {rows[0].number}: {what}", _also(rows[1:], fix))
            for (what, fix), rows in kinds[:_SHOWN]
        ]
        if rest := sum(len(rows) for _, rows in kinds[_SHOWN:]):
            faults.append(Fault(name, f"{rest} more faulty rows were seen"))
        raise InputError(faults)
    return results


def _also(rows: Sequence[Row | Conversation], fix: str) -> str:
    """Before what is to be done, which is to be done in all of them; `what` stays a sentence about one row."""
    if not rows:
        return fix
    numbers = first_few([row.number for row in rows], _SHOWN)
    same = f"the same in row{'s' if len(rows) > 1 else ''} {numbers}"
    return f"{same}; {fix}" if fix else same


def field(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field that must be there."""
    if name not in record:
        like = near(name, record)
        hint = f", {like[0]!r} looks like it" if like else ""
        raise RowFault(f"has no {name!r} (it has {listed(record)}{hint})", "rename or add the field")
    return record[name]


def text(record: Mapping[str, Any], name: str) -> str:
    """A text that must be there and may be empty."""
    value = field(record, name)
    if not isinstance(value, str):
        raise RowFault(f"has {kind_of(value)} in {name!r}, where text belongs")
    return value


def filled(record: Mapping[str, Any], name: str) -> str:
    """A text that must be there and hold more than blanks."""
    value = text(record, name)
    if not value.strip():
        raise RowFault(f"has an empty {name!r}", "remove the row or fill it in")
    return value


def optional(record: Mapping[str, Any], name: str) -> str:
    """Absent, null and blank all mean: none."""
    if record.get(name) is None:
        return ""
    value = text(record, name)
    return value if value.strip() else ""


def from_json(value: Any, name: str) -> Any:
    """A value that may be written as JSON text, such as a call's arguments, as what it stands for."""
    if not isinstance(value, str):
        return value
    try:
        return read_value(name, value)
    except InputError as error:
        fault = error.faults[0]
        raise RowFault(f"has text in {name!r} that is not JSON: {fault.what}", fault.fix) from None


def near(name: str, candidates: Iterable[str]) -> list[str]:
    """The candidate that looks most like `name`, or none."""
    return nearest_words(name, candidates, 1)


def listed(names: Iterable[str]) -> str:
    """Names in quotes, for a sentence."""
    return ", ".join(repr(name) for name in names) or "nothing"
