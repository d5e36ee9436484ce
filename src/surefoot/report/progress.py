"""Progress of a run: a bar that is redrawn on a terminal, plain lines everywhere else.

    training ━━━━━━━━━╸━━━━━━━━━━ 431/1000 · eta 00:41 · ok
    loss 1.234 (eval 1.301 @ 400) · lr 9.1e-05 · grad 0.420 · 3,512 tok/s (411 supervised) · mem 1.2 GB

The guard's state is always shown. There is no drawing thread: the display is redrawn by the run's events, at most ten
times a second. run.log gets the same plain lines in both cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surefoot.report import wording
from surefoot.report.console import Console
from surefoot.report.pace import Timing
from surefoot.training.report import EvalReport, StepReport

_REDRAW = 0.1  # seconds between two redraws
FIRST = range(1, 11)  # always logged, because they show whether a run starts well


class Progress:
    """The display of one session. Call `close` before printing below it."""

    def __init__(
        self,
        console: Console,
        total_steps: int,
        *,
        log_every: int = 1,
        start_step: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._console = console
        self._total = total_steps
        self._log_every = log_every
        self._clock = clock
        self._step = start_step
        self._activity = "training"
        self._eta = self._state = ""
        self._numbers: list[wording.Field] = []
        self._last_eval: EvalReport | None = None
        self._drawn = float("-inf")
        self._live: Live | None = None
        if console.live:
            self._live = Live(self._picture(), console=console.screen, auto_refresh=False)
            self._live.start(refresh=True)
            console.screen.show_cursor(True)  # a killed process could not restore it

    def step(
        self, report: StepReport, timing: Timing, *, consecutive: int = 0, skipped: int = 0, told: bool = False
    ) -> None:
        """Show a step.

        consecutive, skipped: the guard's counts of non-finite steps, in a row and in total.
        told: whether another tool's line has told the step, so that surefoot's is only for run.log.
        """
        self._step = report.step
        self._state = wording.guard_state(report, consecutive, skipped)
        self._numbers = wording.step_numbers(report, timing, self._last_eval)
        self._eta = "" if timing.remaining is None else wording.eta_text(timing.remaining)
        if report.decision == "non_finite":
            self.event(wording.skip_sentence(report, consecutive), style="bold red")
        if is_logged(report, self._total, self._log_every):
            fields = wording.step_line(report, self._total, timing, self._state, self._last_eval)
            # Logged also on a live terminal: after a kill, the last steps are read in run.log.
            self._line(fields, shown=not self._live and not told)
        self._draw()

    def evaluation(self, report: EvalReport, *, improved: bool = False, told: bool = False) -> None:
        """told: as of `step`."""
        self._last_eval = report
        self._line(wording.eval_fields(report, improved), shown=not told)

    def event(self, sentence: str, *, style: str = "") -> None:
        """Print an event on its own line, above the bar."""
        self._console.say(sentence, style=style)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Context manager that shows an activity other than steps: "evaluating", "saving"."""
        self._activity, previous = activity, self._activity
        self._draw(now=True)
        try:
            yield
        finally:
            self._activity = previous
            self._draw(now=True)

    def close(self) -> None:
        """Draw the final state and restore the terminal. May be called twice."""
        if self._live is not None:
            self._draw(now=True)
            self._live.stop()
            self._live = None

    def _line(self, fields: list[wording.Field], *, shown: bool) -> None:
        if shown:
            self._console.say(wording.shown_fields(fields, self._console.columns), logged=wording.fitted(fields))
        else:
            self._console.note(wording.fitted(fields))

    def _draw(self, now: bool = False) -> None:
        if self._live is not None and (now or self._clock() - self._drawn >= _REDRAW):
            self._drawn = self._clock()
            self._live.update(self._picture(), refresh=True)

    def _picture(self) -> RenderableType:
        place = [f"{self._step}/{self._total}", f"eta {self._eta}" if self._eta else "", self._state]
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column()
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(self._activity, "bold"),
            ProgressBar(self._total, self._step, complete_style="cyan", finished_style="cyan"),
            Text(" · ".join(part for part in place if part), "bold red" if self._state.startswith("skipped ") else ""),
        )
        return Group(bar, Text(wording.fitted(self._numbers, self._console.columns)))


def is_logged(report: StepReport, total_steps: int, log_every: int) -> bool:
    """Whether a step is logged: every log_every-th, the first ten, the last, and every skipped step. Depends on the
    step alone, so that a resumed run logs the same ones."""
    return report.step % log_every == 0 or report.step in {*FIRST, total_steps} or report.decision != "stepped"
