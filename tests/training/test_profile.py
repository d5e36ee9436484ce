"""A watched step and a window of steps: what they add up, and that they change nothing."""

from __future__ import annotations

import dataclasses
import gzip
import json
import time
from contextlib import contextmanager

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from helpers.toy_model import bits, same_bits, settings, toy_batches, toy_engine, toy_examples, toy_loss
from helpers.trained_runs import heron_folder, heron_trained
from surefoot.commands.main import main
from surefoot.report.trainer_log import read_rows, without_timing
from surefoot.report.wording import profile_line
from surefoot.training.profile import PARTS, TRACED, WARM_UP, Stopwatch, Window, phases, unwatched
from surefoot.training.report import StepProfile
from surefoot.training.step import train_step

CPU = torch.device("cpu")
SLEEP = 0.02  # seconds; sleeping lasts at least as long as asked
EXAMPLES = toy_examples(12)


def slow_loss(model, batch):
    time.sleep(SLEEP)
    return toy_loss(model, batch)


@contextmanager
def drawing(part):
    """A watch that draws a random number, which the step would have drawn."""
    torch.rand(1)
    yield


def steps(watch_of=lambda step: unwatched, objective=toy_loss, count=3):
    engine, batches = toy_engine(0.3), toy_batches(EXAMPLES, 4)

    def step(number):
        given = {"step": number, "lr": 0.05, "scale": None, "settings": settings(), "watch": watch_of(number)}
        return train_step(engine, objective, batches, **given)

    return engine, [step(number) for number in range(1, count + 1)]


def test_a_watched_step_computes_the_same_bits():
    plain, reports = steps()
    watched, others = steps(lambda step: Stopwatch(CPU))
    assert same_bits(bits(plain), bits(watched))
    assert [one.loss for one in reports] == [one.loss for one in others]
    assert all(one.profile is None for one in reports)
    assert all(one.profile for one in others)
    assert not same_bits(bits(plain), bits(steps(lambda step: drawing)[0]))  # twin


def test_what_happens_in_the_forward_pass_is_counted_there():
    _, reports = steps(lambda step: Stopwatch(CPU), slow_loss)
    for report in reports:
        profile = report.profile
        assert profile.micro_batches == 3
        assert profile.forward_ms >= 1000 * SLEEP > profile.backward_ms
        passes = 3 * (profile.forward_ms + profile.backward_ms) / 1000
        assert profile.tokens_per_second == pytest.approx(report.tokens / passes)
        assert passes < report.seconds  # the rest is the norm and the optimizer


def test_the_means_of_a_table_made_by_hand():
    ticks = iter([0.0, 0.1, 1.0, 1.4, 2.0, 2.3, 3.0, 3.8])  # forward 100 and 300 ms, backward 400 and 800
    watch = Stopwatch(CPU, lambda: next(ticks))
    for part in ("forward", "backward", "forward", "backward"):
        with watch(part):
            pass
    profile = watch.profile(tokens=800)
    assert profile == StepProfile(pytest.approx(200), pytest.approx(600), 2, pytest.approx(500))
    line = profile_line(10, profile)
    assert line == "[profile] forward 200.0ms  backward 600.0ms  (no optimizer.step)  tps 500  step 10, " + (
        "mean of 2 micro-batches"
    )
    assert "1 micro-batch" in profile_line(1, dataclasses.replace(profile, micro_batches=1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("profile"))


def run(folder, name, *arguments):
    ways = {"duration": "4 steps", "log_every": 3, "checkpoint": {"every": "3 steps"}}
    return heron_trained(folder, name, *arguments, **ways)


def test_time_every_writes_every_second_step_and_changes_nothing(folder):
    quiet, output = run(folder, "plain"), run(folder, "watched", "--time-every", "2")
    assert "[profile]" not in quiet
    assert not (folder / "plain" / "profile.jsonl").exists()
    assert output.count("[profile] forward ") == 2
    records = [json.loads(line) for line in (folder / "watched" / "profile.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [2, 4]
    assert all(record["micro_batches"] == 2 and record["backward_ms"] > 0 for record in records)
    one, other = (load_file(folder / name / "adapter_model.safetensors") for name in ("plain", "watched"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    logs = [
        [without_timing(row) for row in read_rows(folder / name / "trainer_log.jsonl")] for name in ("plain", "watched")
    ]
    assert logs[0] == logs[1]


def test_time_every_counts_from_one(folder):
    result = CliRunner().invoke(main, ["train", str(folder / "plain.yaml"), "--time-every", "0"])
    assert result.exit_code == 2
    assert "--time-every" in result.output


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


def test_a_window_changes_no_bit_and_its_trace_has_the_parts(tmp_path):
    told = []
    window = Window(1, 6, 2, CPU, told.append)
    watched, _ = steps(window.watch, count=6)
    window.close()
    assert same_bits(bits(steps(count=6)[0]), bits(watched))
    recorded = told[0]
    assert recorded.operators[0].seconds >= recorded.operators[-1].seconds > 0
    assert "aten::addmm" in {one.name for one in recorded.operators}
    assert not {one.name for one in recorded.operators} & set(PARTS)
    recorded.write_trace(tmp_path / "trace.json.gz")
    events = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("optimizer") >= TRACED
    assert {"forward", "backward"} <= set(names)
