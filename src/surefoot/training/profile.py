"""Measure where the time of a step goes: data, forward, backward and optimizer; first timed, then traced by operator.

    watch = Stopwatch(engine.device)
    report = train_step(..., watch=watch)
    report.profile.forward_ms, report.profile.backward_ms

    window = Window(first=1, last=1000, wanted=5, device=device, finished=print)
    watch = window.watch(step)          # before each step
    with window.between("checkpoint"): save(state)
    window.close()                      # in case the run ends before the window

A GPU runs asynchronously, so each timed part synchronizes before and after: timed steps are slightly slower than others
and compute the same numbers. A window has warm-up steps, then timed steps, then a few steps under torch's profiler. The
profiler slows operators down, small ones most, so times come from the steps before. Evaluation and checkpoints happen
between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from surefoot.models.quiet import muted_stderr
from surefoot.system.counters import Counters, read_counters
from surefoot.training.report import StepProfile

Part = Literal["data", "forward", "backward", "optimizer", "evaluation", "checkpoint"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")
Watch = Callable[[Part], AbstractContextManager[object]]


def unwatched(part: Part) -> AbstractContextManager[object]:
    """A watch that does nothing."""
    return nullcontext()


def named(part: Part) -> AbstractContextManager[object]:
    """A watch that only names the part in a trace."""
    return record_function(part)


class Stopwatch:
    """A watch that times the parts of one step.

    clock: returns the time in seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._device, self._clock = device, clock
        self.seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._passes = 0  # forward passes

    @contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        self._wait()
        started = self._clock()
        with record_function(part):
            yield
            self._wait()
        self.seconds[part] += self._clock() - started
        self._passes += part == "forward"

    def profile(self, tokens: int) -> StepProfile:
        """Return the step's times.

        tokens: input tokens of the step, without padding.
        """
        forward, backward = self.seconds["forward"], self.seconds["backward"]
        total = forward + backward
        return StepProfile(
            forward_ms=1000 * forward / self._passes,
            backward_ms=1000 * backward / self._passes,
            micro_batches=self._passes,
            tokens_per_second=tokens / total if total else None,
            data_ms=1000 * self.seconds["data"],
            optimizer_ms=1000 * self.seconds["optimizer"],
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


WARM_UP = 2  # steps; the first one allocates memory and may compile
TRACED = 2  # steps; a longer trace is slow to open


@dataclass(frozen=True)
class Operator:
    """One operator of the trace.

    seconds: self time, without operators that it calls; GPU time if there is a GPU.
    calls: number of calls.
    """

    name: str
    seconds: float
    calls: int


@dataclass(frozen=True)
class Recorded:
    """The result of a profiling window.

    first, last: the timed steps.
    parts: part -> seconds over all timed steps.
    step_seconds: total seconds of the timed steps, without evaluation and checkpoints between them.
    counted: system counters over the timed steps.
    traced: number of traced steps.
    operators: operators of the trace, slowest first.
    write_trace: writes the trace to a file for Perfetto or chrome://tracing.
    """

    first: int
    last: int
    parts: dict[Part, float]
    step_seconds: float
    counted: Counters
    traced: int
    operators: tuple[Operator, ...]
    write_trace: Callable[[Path], None]

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


def phases(first: int, last: int, wanted: int) -> tuple[range, range]:
    """Return the steps to time and the steps to trace.

    first, last: steps of this session.
    wanted: number of steps to time. A short run has fewer warm-up steps, then fewer timed steps.
    """
    steps = last - first + 1
    traced = min(TRACED, wanted, max(0, steps - 1))
    warm_up = min(WARM_UP, max(0, steps - traced - 1))
    start = first + warm_up
    end = min(start + wanted, last + 1 - traced)
    return range(start, end), range(end, end + traced)


class Window:
    """Times and traces some steps of a run.

    first, last, wanted: see `phases`.
    finished: called once, after the last traced step; not called if no step was timed.
    """

    def __init__(
        self,
        first: int,
        last: int,
        wanted: int,
        device: torch.device,
        finished: Callable[[Recorded], None],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.clocked, self._traced = phases(first, last, wanted)
        self._device, self._finished, self._clock = device, finished, clock
        self._watches: dict[int, Stopwatch] = {}
        self._between: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._paused = self._stepping = self._started = 0.0
        self._before = self._counted = Counters()
        self._current: int | None = None
        self._tracer: profile | None = None
        self._over = False

    def watch(self, step: int) -> Watch:
        """Return the watch for a step; call it before each step of the run, in order."""
        self._end_step()
        if self._over:
            return unwatched
        clocked, traced = self.clocked, self._traced
        if step not in clocked and step not in traced:
            if step >= traced.stop:
                self._finish()
            return unwatched
        if step == traced.start:
            cuda = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._tracer = profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True)
            with muted_stderr():
                self._tracer.start()
        self._current, self._started, self._paused = step, self._clock(), 0.0
        if step in traced:
            return named
        if step == clocked.start:
            self._before = read_counters(self._device.type)
            self._started = self._clock()
        self._watches[step] = Stopwatch(self._device, self._clock)
        return self._watches[step]

    @contextmanager
    def between(self, part: Part) -> Iterator[None]:
        """Context for work between steps, such as an evaluation."""
        if self._current is None:
            yield
            return
        watch = Stopwatch(self._device, self._clock)
        with watch(part):
            yield
        self._paused += watch.seconds[part]
        if self._current in self.clocked:
            self._between[part] += watch.seconds[part]

    def abandon(self) -> None:
        """Stop without a report, because the run has failed."""
        self._over = True
        self._stop_tracer()

    def close(self) -> None:
        """End the window when the run is over, with a report of the steps so far."""
        self._end_step()
        self._finish()

    def _end_step(self) -> None:
        if self._current in self.clocked:
            self._stepping += self._clock() - self._started - self._paused
            self._counted = read_counters(self._device.type).since(self._before)
        self._current = None

    def _finish(self) -> None:
        if self._over:
            return
        self._over = True
        tracer = self._stop_tracer()
        if not self._watches:
            return
        watches = self._watches.values()
        parts: dict[Part, float] = {
            part: self._between[part] + sum(watch.seconds[part] for watch in watches) for part in PARTS
        }
        self._finished(
            Recorded(
                first=min(self._watches),
                last=max(self._watches),
                parts=parts,
                step_seconds=self._stepping,
                counted=self._counted,
                traced=0 if tracer is None else len(self._traced),
                operators=() if tracer is None else _operators(tracer, self._device),
                write_trace=lambda path: None if tracer is None else tracer.export_chrome_trace(str(path)),
            )
        )

    def _stop_tracer(self) -> profile | None:
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            with muted_stderr():
                tracer.stop()
        return tracer


def _operators(tracer: profile, device: torch.device) -> tuple[Operator, ...]:
    """Return the operators of the traced steps, without the part names, which have no time of their own."""
    on_gpu = device.type == "cuda"
    found = [
        Operator(event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6, event.count)
        for event in tracer.key_averages()
        if event.key not in PARTS
    ]
    return tuple(sorted((one for one in found if one.seconds > 0), key=lambda one: -one.seconds))
