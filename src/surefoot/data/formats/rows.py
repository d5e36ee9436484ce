"""Collect the faults of a file's records, and report them grouped by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, cast

from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

_SHOWN = 8  # maximum kinds of fault, and rows per kind, that are listed; others are counted


class Numbered(Protocol):
    """A record or a conversation, with its number in the file and its first line, both from 1."""

    @property
    def number(self) -> int: ...
    @property
    def line(self) -> int: ...


Item = TypeVar("Item", bound=Numbered)
Result = TypeVar("Result")


class RowFault(Exception):
    """A fault of one row. The caller adds the file and the row."""

    def __init__(self, what: str, fix: str = "", code: str = "SF-DATA-ROW"):
        super().__init__(what)
        self.what, self.fix, self.code = what, fix, code


class RowFaults(Generic[Item]):
    """Collects the faulty rows of the file `name`."""

    def __init__(self, name: str):
        self._name = name
        self._found: dict[tuple[str, str, str], list[int]] = {}  # (what, fix, code) -> row numbers
        self._lines: list[int] = []  # line of the first row of each kind
        self._rest = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def attempt(self, item: Item, do: Callable[[Item], Result]) -> Result | None:
        """Call `do` and return its result; on a RowFault, note it and return None."""
        try:
            return do(item)
        except RowFault as fault:
            self.note(item, fault)
            return None

    def note(self, item: Item, fault: RowFault) -> None:
        """Add the fault of a row."""
        kind = (fault.what, fault.fix, fault.code)
        if kind in self._found:
            self._found[kind].append(item.number)
        elif len(self._found) < _SHOWN:
            self._found[kind] = [item.number]
            self._lines.append(item.line)
        else:
            self._rest += 1

    def refuse(self) -> None:
        """Raise one InputError for all faults, if there are any. Each kind of fault is listed once, with its first row
        and the numbers of the others; after _SHOWN kinds, rows are only counted."""
        faults = [
            Fault(f"{self._name}:{line}", f"row {rows[0]}: {what}", _also(rows[1:], fix), code=code)
            for line, ((what, fix, code), rows) in zip(self._lines, self._found.items(), strict=True)
        ]
        if self._rest:
            faults.append(Fault(self._name, f"{self._rest} more rows have faults", code="SF-DATA-ROW"))
        if faults:
            raise InputError(faults)


def each_row(items: Iterable[Item], do: Callable[[Item], Result], name: str) -> list[Result]:
    """Call `do` for every row of the file `name`. Raises one InputError for all rows with faults, see `RowFaults`."""
    faults = RowFaults[Item](name)
    results = [faults.attempt(item, do) for item in items]
    faults.refuse()
    return cast("list[Result]", results)


def _also(rows: Sequence[int], fix: str) -> str:
    """Prefix the fix with the other rows that have the same fault."""
    if not rows:
        return fix
    same = f"the same in row{'s' if len(rows) > 1 else ''} {first_few(rows, _SHOWN)}"
    return f"{same}; {fix}" if fix else same
