"""Timing under a budget, on a clock that the test moves."""

import pytest

from surefoot.planning.probes.timing import best_seconds


class Bench:
    """Runs that take the scheduled seconds, and the clock that sees them pass."""

    def __init__(self, **schedules):
        self.now = 0.0
        self.log = []
        self.schedules = {name: iter(seconds) for name, seconds in schedules.items()}

    def runs(self):
        return {name: lambda name=name: self._run(name) for name in self.schedules}

    def _run(self, name):
        self.log.append(name)
        self.now += next(self.schedules[name])

    def clock(self):
        return self.now


def test_the_best_of_runs_in_turns_without_the_first():
    bench = Bench(a=[0.1, 5, 3, 4], b=[9, 2, 2, 1])
    best = best_seconds(bench.runs(), budget=100, rounds=3, clock=bench.clock)
    assert best == {"a": 3, "b": 1}
    assert bench.log == ["a", "b"] + ["a", "b"] * 3


def test_when_the_budget_is_used_up_each_still_has_one_counted_run():
    bench = Bench(a=[1, 10, 1], b=[1, 7, 1])
    assert best_seconds(bench.runs(), budget=1, rounds=3, clock=bench.clock) == pytest.approx({"a": 10, "b": 7})
    assert bench.log == ["a", "b", "a", "b"]


def test_it_waits_for_the_device_before_and_after():
    events = []
    best_seconds(
        {"a": lambda: events.append("run")},
        budget=1,
        rounds=1,
        wait=lambda: events.append("wait"),
        clock=lambda: 0.0,
    )
    assert events == ["run", "wait", "run", "wait"]


def test_nothing_to_time():
    assert best_seconds({}, budget=1, rounds=3) == {}
