"""One row of the table of bad inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from faults.place import Place

Words = list[str]


@dataclass(frozen=True)
class Case:
    """fault: its number in the catalogue of faults. prepare: spoils one thing and returns the words of the command;
    None is `train run.yaml`. code: of the exit. says: what stands in the one line of the error, place and way out among
    it, or in what a command that succeeds prints. writes: whether the command may leave something behind. faults:
    lines, where several files are at fault."""

    fault: str
    name: str
    prepare: Callable[[Place], Words | None]
    code: int
    says: tuple[str, ...]
    writes: bool = False
    faults: int = 1

    @property
    def id(self) -> str:
        return f"{self.fault}: {self.name}"
