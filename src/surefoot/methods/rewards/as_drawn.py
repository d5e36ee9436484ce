"""Scores of groups whose answers are there, while a server still draws others.

    with AsDrawn(rewards, group, count, describe) as early:
        rollouts.answer(…, arrived=early.arrived)     # from any thread
    scores = early.scores()                           # in the order of the answers, whatever the order they came in

Only rewards that say so (`Reward.at_once`): servers, and graders in other processes. A user's function is called once,
with all answers, on the main thread: it may compare them, use signals, or not be thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from surefoot.methods.rewards.answers import Answers, Score
from surefoot.methods.rewards.terms import Reward

One = TypeVar("One")


class AsDrawn(Generic[One]):
    """At the end of its block all requests are answered, or, after an error, given up."""

    def __init__(
        self, rewards: Sequence[Reward], size: int, count: int, describe: Callable[[Sequence[int], list[One]], Answers]
    ):
        """size: consecutive answers of a group. count: of all answers. describe: makes the input of rewards of these
        places and answers."""
        self._rewards, self._size, self._describe = [one for one in rewards if one.at_once], size, describe
        self._pools = {one.label: ThreadPoolExecutor(one.at_once, f"reward {one.label}") for one in self._rewards}
        self._there: list[dict[int, One]] = [{} for _ in range(0, count, size)]
        self._asked: dict[tuple[str, int], Future[Sequence[Score]]] = {}
        self._lock = threading.Lock()

    def arrived(self, place: int, answer: One) -> None:
        group = place // self._size
        with self._lock:
            there = self._there[group]
            there[place] = answer
            if len(there) < self._size:
                return
            for one in self._rewards:
                self._asked[one.label, group] = self._pools[one.label].submit(self._grade, one, there)

    def scores(self) -> Mapping[str, Sequence[Score]]:
        """By the rewards' labels. Raises what the first of them, in its first group, has raised."""
        groups = range(len(self._there))
        return {
            one.label: [score for group in groups for score in self._asked[one.label, group].result()]
            for one in self._rewards
        }

    def _grade(self, reward: Reward, there: Mapping[int, One]) -> Sequence[Score]:
        places = sorted(there)
        return reward.grade(self._describe(places, [there[place] for place in places]))

    def __enter__(self) -> AsDrawn[One]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            for server in (server for one in self._rewards for server in one.servers):
                server.requests.give_up()
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=kind is not None)
