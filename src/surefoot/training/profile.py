"""Where the time of a step goes: its batches, forward, backward and the optimizer, each by itself.

    watch = Stopwatch(engine.device)
    report = train_step(..., watch=watch)
    report.profile.forward_ms, report.profile.backward_ms

A GPU runs behind the program, so a part is waited for before and after it is timed: the steps that are watched are a
little slower than the others, and compute the same numbers. Each part has its name in a trace of torch's profiler,
where one is taken. Evaluation and checkpoints lie between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch.profiler import record_function

from surefoot.training.report import StepProfile

Part = Literal["data", "forward", "backward", "optimizer", "evaluation", "checkpoint"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "evaluation", "checkpoint")
Watch = Callable[[Part], AbstractContextManager[object]]


def unwatched(part: Part) -> AbstractContextManager[object]:
    """Time nothing, wait for nothing."""
    return nullcontext()


def named(part: Part) -> AbstractContextManager[object]:
    """Time nothing, but give the part its name in a trace."""
    return record_function(part)


class Stopwatch:
    """A watch for one step. clock: seconds."""

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
        """tokens: real input tokens of the step."""
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
