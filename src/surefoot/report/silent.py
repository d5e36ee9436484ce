"""The observer and the console of a rank that is not the first: they hear everything and say nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from surefoot.report.console import Console
from surefoot.report.rows import Row
from surefoot.training.report import EvalReport, StepReport
from surefoot.training.state import RunState

if TYPE_CHECKING:
    from surefoot.data.batch import RecordName


class SilentObserver:
    """Has what `RunObserver` has for the loop and for saving."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def begins(self, step: int, micro_batches: Sequence[Sequence[RecordName]]) -> None:
        pass

    def step(self, report: StepReport, state: RunState) -> None:
        pass

    def evaluation(self, report: EvalReport, state: RunState, improved: bool) -> None:
        pass

    def saved(self, folder: Path, state: RunState) -> None:
        pass

    def caution(self, sentence: str) -> None:
        pass

    def tell(self, sentence: str, *, caution: bool = True) -> None:
        pass

    def samples(self, step: int, answers: Sequence[tuple[str, str]]) -> None:
        pass

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        yield

    def sync(self) -> None:
        pass


@contextmanager
def silent_console() -> Iterator[Console]:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        yield Console(nowhere)
