"""Faults of records: what is wrong with one row, gathered over a file and told by kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar, cast

from surefoot.system.errors import Fault, InputError
from surefoot.system.messages import first_few

_SHOWN = 8  # kinds of fault, and rows with the same one, listed before the rest is only counted


class Numbered(Protocol):
    """A record or a conversation: its number in the file and the line where it starts, both from 1."""

    @property
    def number(self) -> int: ...
    @property
    def line(self) -> int: ...


Item = TypeVar("Item", bound=Numbered)
Result = TypeVar("Result")


class RowFault(Exception):
    """What is wrong with one row; the caller knows the file."""

    def __init__(self, what: str, fix: str = "", code: str = "SF-DATA-ROW"):
        super().__init__(what)
        self.what, self.fix, self.code = what, fix, code


class RowFaults(Generic[Item]):
    """The rows of the file `name` that something could not be done with, gathered one after the other."""

    def __init__(self, name: str):
        self._name = name
        self._found: dict[tuple[str, str, str], list[int]] = {}  # the first kinds, with the numbers of their rows
        self._lines: list[int] = []  # of the first row of each
        self._rest = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def attempt(self, item: Item, do: Callable[[Item], Result]) -> Result | None:
        """What `do` returns; None where the row is at fault."""
        try:
            return do(item)
        except RowFault as fault:
            self.note(item, fault)
            return None

    def note(self, item: Item, fault: RowFault) -> None:
        """Count the fault of this row."""
        kind = (fault.what, fault.fix, fault.code)
        if kind in self._found:
            self._found[kind].append(item.number)
        elif len(self._found) < _SHOWN:
            self._found[kind] = [item.number]
            self._lines.append(item.line)
        else:
            self._rest += 1

    def refuse(self) -> None:
        """One InputError for all of them, where there are any: each kind of fault once, by its first row and the
        numbers of others; the first kinds in full, rows with others counted."""
        faults = [
            Fault(f"{self._name}:{line}", f"row {rows[0]}: {what}", _also(rows[1:], fix), code=code)
            for line, ((what, fix, code), rows) in zip(self._lines, self._found.items(), strict=True)
        ]
        if self._rest:
            faults.append(Fault(self._name, f"{self._rest} more faulty rows were seen", code="SF-DATA-ROW"))
        if faults:
            raise InputError(faults)


def each_row(items: Iterable[Item], do: Callable[[Item], Result], name: str) -> list[Result]:
    """`do` for every row of the file `name`. InputError, as `RowFaults` words it, where there are faulty ones."""
    faults = RowFaults[Item](name)
    results = [faults.attempt(item, do) for item in items]
    faults.refuse()
    return cast("list[Result]", results)


def _also(rows: Sequence[int], fix: str) -> str:
    """Before what is to be done, which is to be done in all of them; `what` stays a sentence about one row."""
    if not rows:
        return fix
    same = f"the same in row{'s' if len(rows) > 1 else ''} {first_few(rows, _SHOWN)}"
    return f"{same}; {fix}" if fix else same
