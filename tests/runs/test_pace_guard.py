"""The guard of pace: it speaks when the same work takes longer, and at nothing else."""

import random
from itertools import pairwise

import pytest

from surefoot.runs import slowness
from surefoot.runs.slowness import FALL, FEWEST, QUIET, RECENT, PaceGuard

RATE = 1e9  # of work per second


def alarms(steps):
    """steps: (seconds, work). The numbers of the steps at which it speaks, and the pace that it tells."""
    guard = PaceGuard()
    told = [(number, guard.step(number, *one)) for number, one in enumerate(steps, start=1)]
    return [(number, slow.pace) for number, slow in told if slow]


def steady(count, seconds=0.5, work=RATE / 2):
    return [(seconds, work)] * count


def test_a_run_that_takes_twice_as_long_is_told_soon_once_and_with_its_pace():
    steps = steady(60) + steady(40, seconds=1.0)
    found = alarms(steps)
    assert [number for number, _ in found] == [60 + RECENT // 2 + 1]  # most of the last few are slow
    assert found[0][1] == pytest.approx(0.5)


@pytest.mark.parametrize("share", [FALL + 0.02, 0.9, 1.5])
def test_a_little_slower_is_no_alarm(share):
    assert alarms(steady(60) + steady(60, seconds=0.5 / share)) == []


def test_one_slow_step_or_two_are_none():
    steps = steady(60) + [(9.0, RATE / 2)] * 2 + steady(60)
    assert alarms(steps) == []


def lengths(count, seed=0, spread=4.0):
    draw = random.Random(seed)
    return [RATE / 2 * draw.uniform(1, spread) for _ in range(count)]


def test_longer_examples_are_none():
    """Four times the work takes four times as long, mixed or after each other."""
    mixed = [(work / RATE, work) for work in lengths(300)]
    assert alarms(mixed) == []
    assert alarms(steady(60) + steady(100, seconds=2.0, work=4 * RATE / 2)) == []


def test_twin_without_their_work_longer_examples_would_be_an_alarm():
    blind = [(seconds, 1.0) for seconds, _ in steady(60) + steady(100, seconds=2.0, work=4 * RATE / 2)]
    assert alarms(blind)


def test_shorter_examples_whose_step_costs_as_much_are_none():
    """On a small model the fixed part of a step is all of it."""
    assert alarms(steady(60) + steady(100, work=RATE / 20)) == []


def test_a_slow_run_among_mixed_lengths_is_seen():
    works = lengths(200)
    steps = [(work / RATE * (2 if number >= 100 else 1), work) for number, work in enumerate(works)]
    found = alarms(steps)
    assert 100 < found[0][0] <= 120


def test_it_is_quiet_for_a_while_and_speaks_again():
    slower = [(0.5 * 2**part, RATE / 2) for part in range(4) for _ in range(QUIET + 20)]
    numbers = [number for number, _ in alarms(slower)]
    assert len(numbers) == 3
    assert all(later - sooner >= QUIET for sooner, later in pairwise(numbers))


def test_before_there_is_an_ordinary_pace_it_says_nothing(monkeypatch):
    steps = [(0.1, RATE / 2)] * (FEWEST - 2) + steady(3)
    assert alarms(steps) == []
    monkeypatch.setattr(slowness, "FEWEST", 2)
    assert alarms(steps)  # twin


def test_steps_without_work_or_time_are_survived():
    assert alarms([(0.0, 0.0)] * 100) == []
    assert alarms([(0.0, 1.0)] * 100) == []
