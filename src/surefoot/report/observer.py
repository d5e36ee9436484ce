"""Observe the training loop: progress on the screen, rows in trainer_log.jsonl, sentences in events.jsonl.

Nothing here changes the run. Use `RunObserver` as a context manager: entering it cuts the events to the resumed step;
leaving it restores the terminal and records how the loop ended, also after an exception. Ranks other than the first use
`SilentObserver` and `silent_console`, which have the same methods and write nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.report import wording
from surefoot.report.console import Console
from surefoot.report.events import Kind, append_answers, append_event, append_profile, append_samples, cut_events
from surefoot.report.flight import FlightRing
from surefoot.report.log_copies import LOGS
from surefoot.report.pace import Pace, Timing, clock_seconds
from surefoot.report.progress import Progress, is_logged
from surefoot.report.trainer_log import NAME, Position, Row, append_row, eval_row, is_eval_row, train_row
from surefoot.system import durable
from surefoot.system.errors import Diverged, EnvironmentFault
from surefoot.system.messages import counted
from surefoot.training.report import EvalReport, StepReport, Unit
from surefoot.training.state import RunState

if TYPE_CHECKING:
    from surefoot.data.batching.batch import RecordName

_WORSE = 1.0  # nats above guessing; a base of random weights is at most some tenths above


class RunObserver:
    """The observer of `training.loop.run_loop` on rank 0.

    epoch: step -> passes over the data after it.
    rows: what `cut_to_step` kept; empty at a fresh start.
    peak_memory: returns bytes so far, None if not measured.
    on_row: called with every row once it is written; returns whether it told the row on the screen, in place of
        surefoot's own line, which is then in run.log alone.
    unit: what a loss is the mean over.
    seed: the run's seed.
    guess: loss of a model that gives every token the same probability; infinite: its loss is no cross entropy.
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
        on_row: Callable[[Row], bool] | None = None,
        unit: Unit = "tokens",
        seed: int = 0,
        guess: float = math.inf,
    ):
        elapsed_before = clock_seconds(rows[-1].get("elapsed_time", "0:00:00")) if rows else 0.0
        self.rows: list[Row] = list(rows)
        self._total, self._log_every = total_steps, log_every
        self._epoch, self._peak_memory = epoch, peak_memory
        self._pace = pace or Pace(elapsed_before=elapsed_before)
        self._run, self._log, self._on_row = run, run / NAME, on_row
        self._unit: Unit = unit
        self._started, self._step, self._guess = start_step, start_step, guess
        self._flight = FlightRing(run, seed, start_step)
        self.progress = Progress(console, total_steps, log_every=log_every, start_step=start_step)

    def __enter__(self) -> RunObserver:
        evaluated = bool(self.rows) and is_eval_row(self.rows[-1]) and self.rows[-1]["current_steps"] == self._started
        cut_events(self._run, self._started, evaluated=evaluated)
        self._flight.begin()
        if self._started:
            self._note("resume", f"resumed after step {self._started} of {self._total}")
        else:
            self._note("start", f"started: {counted(self._total, 'step')}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.progress.close()
        with suppress(EnvironmentFault):  # the error of a full disk is reported elsewhere
            self._note_the_end(error)

    def begins(self, step: int, micro_batches: Sequence[Sequence[RecordName]]) -> None:
        """Record that a step is about to be computed. micro_batches: the examples of each."""
        self._flight.begins(step, micro_batches)

    def step(self, report: StepReport, state: RunState) -> None:
        self._pace.step(report.tokens, report.weight)
        timing, told = self._timing(report.step), False
        if is_logged(report, self._total, self._log_every):
            told = self._keep(train_row(report, self._position(report.step, state), timing))
            self._pace.mark()
        self._step = report.step
        self._flight.add(report)
        guard = state.guard
        if report.decision == "non_finite":
            self._note("non_finite", wording.skip_sentence(report, guard.consecutive))
        elif report.decision == "scaler":
            self._note(
                "skipped", f"step {report.step}: fp16 gradients overflowed; skipped, and the loss scale was lowered"
            )
        elif report.spike is not None:
            sentence = wording.spike_sentence(report)
            self._note("spike", sentence)
            self.progress.event(sentence, style="yellow")
        self.progress.step(report, timing, consecutive=guard.consecutive, skipped=guard.skipped, told=told)
        if report.step == 1 and report.loss is not None and report.loss > self._guess + _WORSE:
            self.caution(wording.worse_than_guessing(report.loss, self._guess))
        if report.profile is not None:
            append_profile(self._run, report.step, report.profile)
            self.progress.event(wording.profile_line(report.step, report.profile))

    def evaluation(self, report: EvalReport, state: RunState, improved: bool) -> None:
        timing = self._timing(report.step)
        told = self._keep(eval_row(report, self._position(report.step, state), timing))
        if improved:
            self._note("best", wording.eval_sentence(report, improved))
        self.progress.evaluation(report, improved=improved, told=told)

    def saved(self, folder: Path, state: RunState) -> None:
        best = state.best is not None and state.best.step == state.step  # saved regardless of checkpoint.every
        text = f"saved {folder.name}"
        self._note("saved", text + (" (the best evaluation so far)" if best else ""))
        self.progress.event(text)  # below the line of that evaluation, which says it

    def caution(self, sentence: str) -> None:
        """Report a problem that does not stop the run."""
        self._note("caution", sentence)
        self.progress.event(sentence, style="yellow")

    def tell(self, sentence: str, *, caution: bool = True) -> None:
        """Show a message of a training stage: a caution, or a figure for the screen and run.log."""
        if caution:
            self.caution(sentence)
        else:
            self.progress.event(sentence)

    def samples(self, step: int, answers: Sequence[tuple[str, str]]) -> None:
        """Record (prompt, answer) pairs generated at an evaluation."""
        append_samples(self._run, step, answers)
        for prompt, answer in answers:
            self.progress.event(wording.sample_text(step, prompt, answer))

    def answers(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """Record rollout answers, generated and scored before the next step, in answers.jsonl."""
        append_answers(self._run, answers)

    @contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Context manager for evaluating and saving: shows the activity and excludes it from the time of steps."""
        with self._pace.pause(), self.progress.during(activity):
            yield

    def sync(self) -> None:
        """Flush the logs. Call it before a checkpoint is published, because a resumed run does not rewrite earlier
        rows."""
        for name in LOGS:
            if (self._run / name).exists():
                durable.flush(self._run / name)

    def _note(self, kind: Kind, text: str) -> None:
        append_event(self._run, kind, self._step, text)

    def _note_the_end(self, error: BaseException | None) -> None:
        if error is None:
            if self._step < self._total:
                self._note("stopped", f"training ended after step {self._step} of {self._total}")
        elif isinstance(error, Diverged):
            self._note("diverged", " ".join(str(error).split()))
        elif isinstance(error, KeyboardInterrupt):
            self._note("stopped", f"interrupted at once after step {self._step} of {self._total}")
        else:
            self._note("failed", " ".join(f"{type(error).__name__}: {error}".split()))

    def _keep(self, row: Row) -> bool:
        """Return what `on_row` returns."""
        self.rows.append(row)
        append_row(self._log, row)
        return self._on_row is not None and self._on_row(row)

    def _position(self, step: int, state: RunState) -> Position:
        return Position(self._total, self._epoch(step), state.tokens, state.supervised, self._unit)

    def _timing(self, step: int) -> Timing:
        timing = self._pace.timing(self._total - step, self._peak_memory())
        return timing if self._unit == "tokens" else replace(timing, supervised_throughput=None)


class SilentObserver:
    """Has the methods of `RunObserver` and does nothing, for ranks other than the first."""

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

    def answers(self, answers: Sequence[Mapping[str, Any]]) -> None:
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
