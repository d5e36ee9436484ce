"""The window of steps that `train --profile N` looks at: which ones, what it adds up, and that it changes nothing."""

import gzip
import json
from contextlib import contextmanager

import pytest
import torch

from helpers.toy_model import bits, same_bits, settings, toy_batches, toy_engine, toy_examples, toy_loss
from surefoot.training.profile import PARTS, TRACED, WARM_UP, Window, phases, unwatched
from surefoot.training.step import train_step

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("first", "last", "wanted", "clocked", "traced"),
    [
        (1, 100, 5, [3, 4, 5, 6, 7], [8, 9]),
        (51, 100, 1, [53], [54]),
        (1, 6, 5, [3, 4], [5, 6]),  # less is clocked
        (1, 4, 2, [2], [3, 4]),  # less warm-up
        (1, 2, 5, [1], [2]),
        (1, 1, 5, [1], []),
        (1, 0, 5, [], []),  # nothing is left to do
    ],
)
def test_which_steps(first, last, wanted, clocked, traced):
    assert [list(found) for found in phases(first, last, wanted)] == [clocked, traced]


class Ticks:
    """A clock that tests move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_times_of_a_window_worked_out_by_hand():
    clock, told = Ticks(), []
    window = Window(1, 10, 2, CPU, told.append, clock)
    for step in range(1, 11):
        watch = window.watch(step)
        for part, seconds in (("data", 1), ("forward", 2), ("backward", 4), ("optimizer", 8)):
            with watch(part):
                clock.now += seconds
        clock.now += 16  # the log
        with window.between("checkpoint"):
            clock.now += 32
        assert len(told) == (step >= WARM_UP + 2 + TRACED + 1)
    (recorded,) = told
    assert (recorded.first, recorded.last, recorded.traced) == (3, 4, TRACED)
    assert recorded.parts == dict(zip(PARTS, (2, 4, 8, 16, 0, 64), strict=True))
    assert recorded.step_seconds == 2 * (1 + 2 + 4 + 8 + 16)


def test_a_run_that_ends_early_tells_what_there_is_and_one_that_fails_nothing():
    told = []
    window = Window(1, 10, 5, CPU, told.append)
    for step in (1, 2, 3):
        with window.watch(step)("forward"):
            pass
    window.close()
    window.close()
    assert [(one.first, one.last, one.operators) for one in told] == [(3, 3, ())]
    failed = Window(1, 10, 5, CPU, told.append)
    failed.watch(3)
    failed.abandon()
    failed.close()
    assert len(told) == 1


def run(watch_of, steps=6):
    engine, batches = toy_engine(0.3), toy_batches(toy_examples(12), 4)
    for number in range(1, steps + 1):
        train_step(
            engine,
            toy_loss,
            batches,
            step=number,
            lr=0.05,
            scale=None,
            settings=settings(),
            watch=watch_of(number),
        )
    return bits(engine)


def test_a_window_changes_no_bit_and_its_trace_has_the_parts(tmp_path):
    told = []
    window = Window(1, 6, 2, CPU, told.append)
    watched = run(window.watch)
    window.close()
    assert same_bits(run(lambda step: unwatched), watched)
    recorded = told[0]
    assert recorded.operators[0].seconds >= recorded.operators[-1].seconds > 0
    assert "aten::addmm" in {one.name for one in recorded.operators}
    assert not {one.name for one in recorded.operators} & set(PARTS)
    recorded.write_trace(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("optimizer") >= TRACED
    assert {"forward", "backward"} <= set(names)


def test_twin_a_window_that_draws_is_noticed():
    @contextmanager
    def drawing(part):
        torch.rand(1)
        yield

    assert not same_bits(run(lambda step: unwatched), run(lambda step: drawing))
