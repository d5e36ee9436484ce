"""Listens to the training loop: progress on the screen, rows in trainer_log.jsonl, sentences for events.

Nothing here reaches back into the run. Use it as a context manager: leaving it gives the terminal back, whatever
happened inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from surefoot import durable
from surefoot.report import wording
from surefoot.report.console import Console
from surefoot.report.pace import Pace, clock_seconds
from surefoot.report.progress import Progress, is_logged
from surefoot.report.rows import Position, Row, eval_row, train_row
from surefoot.report.trainer_log import NAME, append_row
from surefoot.training.report import EvalReport, StepReport
from surefoot.training.state import RunState


class RunObserver:
    """The observer of `training.loop.train`.

    epoch: step -> passes over the data after it. rows: what `cut_to_step` kept; empty at a fresh start. peak_memory:
    bytes so far, None where nothing measures it.
    """

    def __init__(
        self,
        console: Console,
        run: Path,
        *,
        total_steps: int,
        log_every: int,
        epoch: Callable[[int], float],
        peak_memory: Callable[[], int | None],
        rows: Sequence[Row] = (),
        start_step: int = 0,
        pace: Pace | None = None,
    ):
        elapsed_before = clock_seconds(rows[-1]["elapsed_time"]) if rows else 0.0
        self.rows: list[Row] = list(rows)
        self._total, self._log_every = total_steps, log_every
        self._epoch, self._peak_memory = epoch, peak_memory
        self._pace = pace or Pace(elapsed_before=elapsed_before)
        self._log = run / NAME
        self.progress = Progress(console, total_steps, log_every=log_every, start_step=start_step)

    def __enter__(self) -> RunObserver:
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.close()

    def step(self, report: StepReport, state: RunState) -> None:
        self._pace.step(report.tokens, report.weight)
        timing = self._pace.timing(self._total - report.step, self._peak_memory())
        if is_logged(report, self._total, self._log_every):
            self._keep(train_row(report, self._position(report.step, state), timing))
            self._pace.mark()
        guard = state.guard
        self.progress.step(report, timing, consecutive=guard.consecutive, skipped=guard.skipped)

    def evaluation(self, report: EvalReport, state: RunState, improved: bool) -> None:
        timing = self._pace.timing(self._total - report.step, self._peak_memory())
        self._keep(eval_row(report, self._position(report.step, state), timing))
        self.progress.evaluation(report, improved=improved)

    def saved(self, folder: Path, state: RunState) -> None:
        self.progress.event(f"saved {folder.name}")

    def samples(self, step: int, answers: Sequence[tuple[str, str]]) -> None:
        """(prompt, answer) pairs generated at an evaluation, for reading."""
        for prompt, answer in answers:
            self.progress.event(wording.sample_text(step, prompt, answer))

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Around evaluating and saving: shown, and not counted as time of a step."""
        with self._pace.pause(), self.progress.during(activity):
            yield

    def sync(self) -> None:
        """Before a checkpoint is published: the rows up to it are on the disk."""
        durable.flush(self._log)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        append_row(self._log, row)

    def _position(self, step: int, state: RunState) -> Position:
        return Position(self._total, self._epoch(step), state.tokens, state.supervised)
