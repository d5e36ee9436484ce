"""The search: one axis after the other, from the plan's own choices, each trial in a process of its own.

Speed is close to a product of independent parts (type, kernels) and of how many examples are computed at once. Some
keys move the best number of those, so each of their values is judged at its own best size; and the walk is taken again
until it changes nothing. It knows no process and no file: what tries is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.commands.tune.space import Axis, Settings, Space, needs_threads, neighbours

GAIN = 1.02  # times: a setting must be so much faster to replace another; less is noise
_MOVE_THE_SIZE = ("data.packing", "gradient_checkpointing")
_PAID_BEFORE_STEP_1 = ("compile",)  # what takes too long once will again, whatever stands beside it


@dataclass(frozen=True)
class Tried:
    """A setting and what came of it. failure: why it cannot be taken, empty where it can. rate: real tokens a second,
    0 where it was not timed. memory: measured bytes, waiting: share of a step spent on waiting for batches. early: it
    was so slow that it was given up before all its steps were timed. held_up: share of its time in which other programs
    had the processor. short_of_memory: that is the failure. unfinished: so it is that it took too long."""

    settings: Settings
    rate: float = 0.0
    memory: int = 0
    waiting: float = 0.0
    failure: str = ""
    early: bool = False
    held_up: float = 0.0
    short_of_memory: bool = False
    unfinished: bool = False

    @property
    def passed(self) -> bool:
        return not self.failure


Try = Callable[[Settings], Tried]  # the same object for settings that plan what others did


class Search:
    """tried: every setting that was looked at, once, in order. told: is told each as it comes."""

    def __init__(self, space: Space, attempt: Try, told: Callable[[Tried], None]):
        self._space, self._attempt, self._told = space, attempt, told
        self.tried: list[Tried] = []

    def run(self) -> Tried:
        """The best setting that passed; the start where it did and nothing was clearly faster. Where nothing passed,
        the start as it came out."""
        best, before = self._look(self._space.start), None
        while best is not before:
            before = best
            for axis in self._space.axes:
                best = self._along(axis, best)
        return best

    @property
    def best(self) -> Tried:
        """Of all that was tried so far, as `run` would take it."""
        best = self.tried[0]
        for other in self.tried[1:]:
            best = better(best, other)
        return best

    def _along(self, axis: Axis, best: Tried) -> Tried:
        if axis.key == "data.workers" and best.passed and not needs_threads(best.waiting):
            return best
        if axis.key == "gradient_checkpointing" and not self._is_short_of_memory():
            return best
        return self._climb(axis, best) if axis.ordered else self._compare(axis, best)

    def _compare(self, axis: Axis, best: Tried) -> Tried:
        here = best.settings
        for value in axis.values:
            if axis.key in _PAID_BEFORE_STEP_1 and self._took_too_long(axis.key, value):
                continue
            needed = {key: one for key, one in axis.needs.get(value, {}).items() if key in here}
            other = self._look({**here, **needed, axis.key: value})
            if axis.key in _MOVE_THE_SIZE and value != here[axis.key] and (other.rate or other.short_of_memory):
                other = self._at_its_own_size(other)
            best = better(best, other)
        return best

    def _at_its_own_size(self, tried: Tried) -> Tried:
        size = next((axis for axis in self._space.axes if axis.key == "batch.micro"), None)
        return tried if size is None else self._climb(size, tried)

    def _climb(self, axis: Axis, best: Tried) -> Tried:
        """Up while it helps, else down while it does."""
        for direction in range(2):
            moved = False
            while step := self._step(axis, best, direction):
                nearer = better(best, step)
                if nearer is best:
                    break
                best, moved = nearer, True
            if moved:
                break
        return best

    def _step(self, axis: Axis, best: Tried, direction: int) -> Tried | None:
        at = best.settings[axis.key]
        upward = [value for value in neighbours(axis, at) if (value > axis.place(at)) == (direction == 0)]
        return self._look({**best.settings, axis.key: upward[0]}) if upward else None

    def _look(self, settings: Settings) -> Tried:
        known = next((one for one in self.tried if one.settings == settings), None)
        if known is not None:
            return known
        found = self._attempt(settings)
        if not any(found is one for one in self.tried):
            self.tried.append(found)
            self._told(found)
        return found

    def _took_too_long(self, key: str, value: Any) -> bool:
        return any(one.unfinished and one.settings.get(key) == value for one in self.tried)

    def _is_short_of_memory(self) -> bool:
        return any(one.short_of_memory for one in self.tried)


def better(best: Tried, other: Tried) -> Tried:
    """`other` where it passed and is clearly faster, or where it passed and the best one did not."""
    if not other.passed:
        return best
    return other if not best.passed or other.rate > GAIN * best.rate else best


def grid(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    """Every combination of the axes' values: what a search is held against."""
    if not axes:
        yield {}
        return
    first, *others = axes
    for value in first.values:
        for rest in grid(others):
            yield {first.key: value, **rest}
