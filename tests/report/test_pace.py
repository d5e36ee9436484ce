"""The forecast counts this session's steps and nothing else."""

import pytest

from surefoot.report.pace import Pace, clock_seconds, clock_text, typical


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def stepping(pace, clock, seconds, *, tokens=100, supervised=10, evaluation=0.0):
    for length in seconds:
        with pace.pause():
            clock.now += evaluation
        clock.now += length
        pace.step(tokens, supervised)


def test_no_step_no_forecast():
    timing = Pace(clock=Clock()).timing(10)
    assert timing.remaining is None
    assert timing.throughput is None


def test_evaluation_and_saving_are_left_out():
    clock = Clock()
    pace = Pace(clock=clock)
    stepping(pace, clock, [2.0] * 10, evaluation=50.0)
    timing = pace.timing(steps_left=7)
    assert timing.remaining == pytest.approx(14.0)
    assert timing.throughput == pytest.approx(50.0)
    assert timing.supervised_throughput == pytest.approx(5.0)
    assert timing.elapsed == pytest.approx(10 * 52.0)


def test_twin_without_the_pause_the_forecast_is_wrong():
    clock = Clock()
    pace = Pace(clock=clock)
    stepping(pace, clock, [52.0] * 10)
    assert pace.timing(steps_left=7).remaining == pytest.approx(7 * 52.0)


def test_one_slow_step_does_not_spoil_it():
    clock = Clock()
    pace = Pace(clock=clock)
    stepping(pace, clock, [90.0] + [1.0] * 20)
    assert pace.timing(steps_left=100).remaining == pytest.approx(100.0)
    assert sum([90.0] + [1.0] * 20) / 21 > 5  # the plain mean, which would


def test_it_follows_a_lasting_change():
    clock = Clock()
    pace = Pace(clock=clock)
    stepping(pace, clock, [1.0] * 100 + [3.0] * 64)
    assert pace.timing(steps_left=10).remaining == pytest.approx(30.0)


def test_a_resumed_session_adds_elapsed_time_but_forecasts_from_its_own_steps():
    clock = Clock()
    pace = Pace(elapsed_before=3600.0, clock=clock)
    stepping(pace, clock, [2.0] * 4)
    timing = pace.timing(steps_left=5)
    assert timing.elapsed == pytest.approx(3608.0)
    assert timing.remaining == pytest.approx(10.0)


def test_the_token_rate_is_that_of_the_window():
    clock = Clock()
    pace = Pace(clock=clock)
    stepping(pace, clock, [1.0], tokens=100)
    pace.mark()
    stepping(pace, clock, [1.0, 1.0], tokens=700)
    assert pace.timing(0).throughput == pytest.approx(700.0)


@pytest.mark.parametrize(
    ("seconds", "expected"), [([], None), ([4.0], 4.0), ([1.0, 3.0], 2.0), ([1.0, 2.0, 99.0], 2.0)]
)
def test_typical(seconds, expected):
    assert typical(seconds) == expected


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.9, "0:00:59"), (3661, "1:01:01"), (93784, "26:03:04")]
)
def test_clock_text(seconds, text):
    assert clock_text(seconds) == text
    assert clock_seconds(text) == int(seconds)
