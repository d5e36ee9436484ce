"""The guard of a run's pace: it hears of every step, and when the run slows down it looks for the cause, once.

It reads clocks and counters of the system, and changes nothing of the run. Only the first rank has one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from surefoot.data.batching.batch import Weighted
from surefoot.report.slowness import Moment, causes, slow_sentence
from surefoot.runs.profiling import Arithmetic
from surefoot.system import hardware
from surefoot.system.counters import Counters, busiest_others, read_counters
from surefoot.training.background import is_writing
from surefoot.training.loop import Job, Observer
from surefoot.training.pace_guard import RECENT, PaceGuard, Slow
from surefoot.training.report import EvalReport, StepReport
from surefoot.training.state import RunState

_LOOK = 0.2  # seconds for which the run sleeps to see what others do
_APART = 1.0  # seconds between two readings of the counters
_READINGS = 60


class PaceObserver:
    """An observer in front of another one, to which it hands everything on.

    say: prints a caution.
    rollouts: the model runs while batches are made, for as long as its answers are long: that time is not judged.
    alone: no other rank is on this machine.
    """

    def __init__(
        self, observer: Observer, arithmetic: Arithmetic, say: Callable[[str], None], *, rollouts: bool, alone: bool
    ):
        self._observer, self._arithmetic, self._say, self._rollouts = observer, arithmetic, say, rollouts
        self._alone = alone
        self._guard = PaceGuard()
        self._wait, self._work = 0.0, 0.0  # of the step: seconds until its batches were there, `Arithmetic.effort`
        self._waits: deque[float] = deque(maxlen=_READINGS)  # shares of steps
        self._paces: deque[tuple[float, int]] = deque(maxlen=RECENT)  # seconds, tokens
        self._device = arithmetic.plan.device.value
        self._readings: deque[tuple[int, Counters]] = deque(maxlen=_READINGS)
        self._clock = gpu_clock(self._device)

    def watched(self, job: Job) -> Job:
        """The job whose batches are timed."""

        def batches(step: int) -> Sequence[Weighted]:
            started = time.perf_counter()
            found = job.batches(step)
            self._wait = 0.0 if self._rollouts else time.perf_counter() - started
            self._work = self._arithmetic.effort(found)
            return found

        return replace(job, batches=batches)

    def step(self, report: StepReport, state: RunState) -> None:
        self._observer.step(report, state)
        seconds = report.seconds + self._wait
        self._waits.append(self._wait / seconds if seconds else 0.0)
        self._paces.append((seconds, report.tokens))
        if is_writing():  # a checkpoint beside the steps takes a core for a while, and is no fault
            return
        slow = self._guard.step(report.step, seconds, self._work)
        if slow is not None:
            self._tell(report.step, slow)
        elif not self._readings or time.monotonic() - self._readings[-1][1].seconds >= _APART:
            self._readings.append((report.step, read_counters(self._device)))

    def evaluation(self, report: EvalReport, state: RunState, improved: bool) -> None:
        self._observer.evaluation(report, state, improved)

    def saved(self, folder: Path, state: RunState) -> None:
        self._observer.saved(folder, state)

    def _tell(self, step: int, slow: Slow) -> None:
        now = read_counters(self._device)
        earlier = [counters for at, counters in self._readings if at < slow.since] or [now]
        waits = list(self._waits)
        machine = hardware.detect()
        full = machine.kind == "cpu" and machine.free is not None  # a GPU's is, by torch's own cache
        moment = Moment(
            before=earlier[-1].since(earlier[0]),
            slow=now.since(earlier[-1]),
            others=busiest_others(_LOOK, siblings=self._alone),
            cores=hardware.usable_cores(),
            threads=torch.get_num_threads(),
            planned=self._arithmetic.plan.threads.value,
            wait=sum(waits[-RECENT:]) / RECENT,
            waited=sum(waits[:-RECENT]) / max(1, len(waits) - RECENT),
            used=machine.memory - (machine.free or 0) if full else 0,
            memory=machine.memory,
            clock=_share(gpu_clock(self._device), self._clock),
        )
        seconds, tokens = (sum(column) for column in zip(*self._paces, strict=True))
        self._say(slow_sentence(step, slow.pace, tokens / seconds, list(causes(moment))))
        # So that the next sentence is about what happens from here on, not about the same slowdown.
        self._readings.clear()


def gpu_clock(device: str) -> float | None:
    """MHz; None where there is no GPU, or nothing that tells."""
    if device != "cuda":
        return None
    try:
        return float(torch.cuda.clock_rate())
    except Exception:  # without NVIDIA's library for Python, or without the right to ask
        return None


def _share(now: float | None, then: float | None) -> float | None:
    return now / then if now is not None and then else None
