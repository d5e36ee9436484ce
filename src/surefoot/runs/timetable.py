"""Durations become steps: how long the run is, and after which steps it evaluates and saves.

The order of the examples is a pure function of the seed, so even a duration in tokens is a number of steps before the
first one is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from surefoot.config.durations import Duration


@dataclass(frozen=True)
class Timetable:
    """All in optimizer steps, counted from 1; an evaluation at 0 comes before the first. The last step is always
    evaluated and saved."""

    steps_per_epoch: int
    total_steps: int
    eval_steps: frozenset[int]
    save_steps: frozenset[int]

    def epoch(self, step: int) -> float:
        """Epochs done after `step` steps."""
        return step / self.steps_per_epoch

    def next_step(self, done: int) -> int:
        """The step after `done` steps; the last one again where there is none, for whoever looks at its batches."""
        return min(done + 1, self.total_steps)


def make_timetable(
    duration: Duration,
    eval_every: Duration | None,
    save_every: Duration,
    steps_per_epoch: int,
    tokens_of_step: Callable[[int], int],
    *,
    eval_at_start: bool = False,
) -> Timetable:
    """tokens_of_step: real input tokens of step 1, 2, …; asked only when a duration is given in tokens."""
    total = length_in_steps(duration, steps_per_epoch, tokens_of_step)

    def due(every: Duration | None) -> frozenset[int]:
        steps = {total}
        for step in _multiples(every, steps_per_epoch, tokens_of_step) if every else ():
            if step >= total:
                break
            steps.add(step)
        return frozenset(steps)

    start = frozenset({0} if eval_at_start else ())
    return Timetable(steps_per_epoch, total, due(eval_every) | start, due(save_every))


def length_in_steps(duration: Duration, steps_per_epoch: int, tokens_of_step: Callable[[int], int]) -> int:
    """At least one step."""
    return next(_multiples(duration, steps_per_epoch, tokens_of_step))


def _multiples(every: Duration, steps_per_epoch: int, tokens_of_step: Callable[[int], int]) -> Iterator[int]:
    """The steps at whose end one, two, three … times `every` have passed; strictly increasing, without end."""
    if every.unit == "tokens":
        yield from _token_multiples(every.count, tokens_of_step)
        return
    last = 0
    number = 0
    while True:
        number += 1
        length = every.count * number * (1 if every.unit == "steps" else steps_per_epoch)
        step = max(1, round(length))
        if step > last:
            last = step
            yield step


def _token_multiples(every: float, tokens_of_step: Callable[[int], int]) -> Iterator[int]:
    step, tokens, bar = 0, 0, every
    while True:
        step += 1
        tokens += tokens_of_step(step)
        if tokens >= bar:
            bar = every * (tokens // every + 1)
            yield step
