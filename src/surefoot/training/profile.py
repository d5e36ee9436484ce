"""Where the time of a step goes: forward and backward, each by itself, over the micro-batches of one step.

    watch = Stopwatch(engine.device)
    report = train_step(..., watch=watch)
    report.profile.forward_ms, report.profile.backward_ms

A GPU runs behind the program, so a part is waited for before and after it is timed: the steps that are watched are a
little slower than the others, and compute the same numbers. The optimizer's step, reading the batches and evaluation
are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch

from surefoot.training.report import StepProfile

Part = Literal["forward", "backward"]
Watch = Callable[[Part], AbstractContextManager[object]]


def unwatched(part: Part) -> AbstractContextManager[object]:
    """Time nothing, wait for nothing."""
    return nullcontext()


class Stopwatch:
    """A watch for one step. clock: seconds."""

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._device, self._clock = device, clock
        self._seconds: dict[Part, list[float]] = {"forward": [], "backward": []}

    @contextmanager
    def __call__(self, part: Part) -> Iterator[None]:
        self._wait()
        started = self._clock()
        yield
        self._wait()
        self._seconds[part].append(self._clock() - started)

    def profile(self, tokens: int) -> StepProfile:
        """tokens: real input tokens of the step."""
        forward, backward = self._seconds["forward"], self._seconds["backward"]
        total = sum(forward) + sum(backward)
        return StepProfile(
            forward_ms=1000 * sum(forward) / len(forward),
            backward_ms=1000 * sum(backward) / len(backward),
            micro_batches=len(forward),
            tokens_per_second=tokens / total if total else None,
        )

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
