"""Timing under a budget, on a clock that the test moves.

What ends a form, and what ends the process: a GPU that nobody can use any more is no later form's fault.
"""

import pytest
import torch

from surefoot.planning.probes import timing
from surefoot.planning.probes.attention import check, check_cases
from surefoot.planning.probes.timing import attempt, best_seconds, seconds_or_failures

CPU = torch.device("cpu")


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
    best = best_seconds(bench.runs(), CPU, budget=100, rounds=3, clock=bench.clock)
    assert best == {"a": 3, "b": 1}
    assert bench.log == ["a", "b"] + ["a", "b"] * 3


def test_when_the_budget_is_used_up_each_still_has_one_counted_run():
    bench = Bench(a=[1, 10, 1], b=[1, 7, 1])
    assert best_seconds(bench.runs(), CPU, budget=1, rounds=3, clock=bench.clock) == pytest.approx({"a": 10, "b": 7})
    assert bench.log == ["a", "b", "a", "b"]


class Queue:
    """A GPU whose kernels begin when they are launched, or once the one before has ended."""

    LAUNCH, KERNEL, CYCLES = 1.0, 0.1, 1e-6

    def __init__(self, monkeypatch):
        self.host = self.done = 0.0
        for name in ("synchronize", "_sleep", "Event"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name.strip("_").lower()))

    def kernel(self, seconds=KERNEL):
        self.host += self.LAUNCH
        self.done = max(self.done, self.host) + seconds

    def sleep(self, cycles):
        self.done = max(self.done, self.host) + cycles * self.CYCLES

    def synchronize(self):
        self.host = self.done = max(self.host, self.done)

    def event(self, enable_timing):
        return Mark(self)


class Mark:
    def __init__(self, queue):
        self.queue = queue

    def record(self):
        self.at = max(self.queue.host, self.queue.done)

    def elapsed_time(self, end):
        return 1000 * (end.at - self.at)


def three_kernels(monkeypatch):
    queue = Queue(monkeypatch)
    return best_seconds({"a": lambda: [queue.kernel() for _ in range(3)]}, torch.device("cuda"), budget=1, rounds=1)


def test_on_a_gpu_kernels_are_timed_and_not_their_launches(monkeypatch):
    assert three_kernels(monkeypatch)["a"] == pytest.approx(3 * Queue.KERNEL)


def test_twin_without_a_lead_launches_are_timed(monkeypatch):
    monkeypatch.setattr(timing, "_AHEAD", 0)
    assert three_kernels(monkeypatch)["a"] == pytest.approx(3 * Queue.LAUNCH + Queue.KERNEL)


def test_nothing_to_time():
    assert best_seconds({}, CPU, budget=1, rounds=3) == {}


BROKEN = torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nand advice")


def failing(error):
    def run(*given):
        raise error

    return run


@pytest.fixture
def gpu(monkeypatch):
    """A process that has one. What its list holds, the next wait for it raises."""
    pending = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: failing(pending.pop())() if pending else None)
    return pending


def test_what_runs_and_what_does_not():
    assert attempt(lambda: 3) == (3, "")
    assert attempt(failing(RuntimeError("No kernel.\nmore"))) == (None, "No kernel.")  # the first line of its words
    assert attempt(failing(RuntimeError())) == (None, "RuntimeError")
    assert attempt(failing(torch.OutOfMemoryError("OOM"))) == (None, "OOM")
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0)


def test_a_broken_gpu_is_raised_by_whatever_way_it_came(gpu):
    with pytest.raises(torch.AcceleratorError):
        attempt(failing(BROKEN))
    gpu.append(BROKEN)
    with pytest.raises(torch.AcceleratorError):
        attempt(failing(RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")))


def test_twin_a_gpu_that_goes_on_is_not(gpu):
    assert attempt(failing(RuntimeError("No kernel."))) == (None, "No kernel.")
    gpu.append(BROKEN)
    assert attempt(failing(torch.OutOfMemoryError("CUDA out of memory")))[1]  # nobody waits for that


def test_neither_the_check_nor_the_timing_blames_a_form_for_it():
    with pytest.raises(torch.AcceleratorError):
        check(failing(BROKEN), check_cases(1, 8, "fp32", torch.device("cpu"))[:1], "fp32")
    for maker in (failing(BROKEN), lambda: failing(BROKEN)):
        with pytest.raises(torch.AcceleratorError):
            seconds_or_failures({"flash": maker}, CPU, budget=0.0, rounds=1)


@pytest.mark.parametrize("where", ["made", "run"])
def test_one_that_cannot_be_made_or_run_is_not_timed_and_the_rest_is(where):
    fails, log = failing(torch.OutOfMemoryError("OOM")), []
    makers = {"large": fails if where == "made" else lambda: fails, "small": lambda: lambda: None}
    seconds, untimed = seconds_or_failures(makers, CPU, budget=0.0, rounds=1, begin=log.append)
    assert list(seconds) == ["small"]
    assert list(untimed) == ["large"]
    assert untimed["large"].endswith(": OOM")
    assert log[:2] == ["large", "small"]  # each is announced before it is made
    assert log.count("small") == 3  # and before each run
