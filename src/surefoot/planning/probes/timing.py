"""Timing under a budget: the best of many short runs, taken in turns.

The best run is the one that other programs disturbed least; taking turns keeps a slow second from hitting one candidate
alone. The first run of each warms up and is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch

from surefoot.planning.probes.faults import attempt

Clock = Callable[[], float]


@contextmanager
def one_thread() -> Iterator[None]:
    """CPU operators run on one thread inside. On a busy machine threads that wait for each other cost more than they
    save."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def best_seconds(
    runs: Mapping[str, Callable[[], object]],
    *,
    budget: float,
    rounds: int,
    wait: Callable[[], object] = lambda: None,
    clock: Clock = time.perf_counter,
) -> dict[str, float]:
    """Seconds of the best run per name. budget: seconds in all; each gets one counted run even when they are used up.

    wait: makes the device finish its work (synchronise), so that a run is timed to its end.
    """
    end = clock() + budget
    best: dict[str, float] = {}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            if name in best and clock() > end:
                return best | {name: _timed(run, wait, clock) for name, run in runs.items() if name not in best}
            best[name] = min(best.get(name, float("inf")), _timed(run, wait, clock))
    return best


def seconds_or_failures(
    makers: Mapping[str, Callable[[], Callable[[], object]]],
    *,
    budget: float,
    rounds: int,
    wait: Callable[[], object] = lambda: None,
    clock: Clock = time.perf_counter,
    begin: Callable[[str], object] = lambda name: None,
) -> tuple[dict[str, float], dict[str, str]]:
    """As `best_seconds`, of those that run; and of the others why not: another program may take the memory before the
    inputs are made, or later.

    makers: by name, what makes the run with its inputs. begin: is told of each before it is made and before it runs.
    """
    failures: dict[str, str] = {}

    def tried(name: str, run: Callable[[], object]) -> object:
        """What `run` returns; None where it, or the run before, could not."""
        if name in failures:
            return None
        begin(name)
        found, why = attempt(run)
        if why:
            failures[name] = f"cannot be timed: {why}"
        return found

    made = {name: tried(name, make) for name, make in makers.items()}
    runs = {name: partial(tried, name, run) for name, run in made.items() if callable(run)}
    found = best_seconds(runs, budget=budget, rounds=rounds, wait=wait, clock=clock)
    return {name: seconds for name, seconds in found.items() if name not in failures}, failures


def _timed(run: Callable[[], object], wait: Callable[[], object], clock: Clock) -> float:
    wait()
    start = clock()
    run()
    wait()
    return clock() - start
