"""`train --time-every N`: forward and backward are timed apart, in the steps asked for, and no number changes."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from helpers.toy_model import bits, same_bits, settings, toy_batches, toy_engine, toy_examples, toy_loss
from helpers.trained_runs import heron_folder, heron_trained
from surefoot.commands.main import main
from surefoot.report.rows import without_timing
from surefoot.report.trainer_log import read_rows
from surefoot.report.wording import profile_line
from surefoot.training.profile import Stopwatch, unwatched
from surefoot.training.report import StepProfile
from surefoot.training.step import train_step

CPU = torch.device("cpu")
SLEEP = 0.02  # seconds; sleeping lasts at least as long as asked
EXAMPLES = toy_examples(12)


def slow_loss(model, batch):
    time.sleep(SLEEP)
    return toy_loss(model, batch)


def steps(watch=lambda: unwatched, objective=toy_loss, dropout=0.3):
    engine, batches = toy_engine(dropout), toy_batches(EXAMPLES, 4)

    def step(number):
        return train_step(
            engine, objective, batches, step=number, lr=0.05, scale=None, settings=settings(), watch=watch()
        )

    reports = [step(number) for number in (1, 2, 3)]
    return engine, reports


def test_a_watched_step_computes_the_same_bits():
    plain, reports = steps()
    watched, others = steps(lambda: Stopwatch(CPU))
    assert same_bits(bits(plain), bits(watched))
    assert [one.loss for one in reports] == [one.loss for one in others]
    assert all(one.profile is None for one in reports)
    assert all(one.profile for one in others)


def test_twin_a_watch_that_draws_random_numbers_is_noticed():
    class Drawing(Stopwatch):
        def __call__(self, part):
            torch.rand(1)
            return super().__call__(part)

    assert not same_bits(bits(steps()[0]), bits(steps(lambda: Drawing(CPU))[0]))


def test_what_happens_in_the_forward_pass_is_counted_there():
    _, reports = steps(lambda: Stopwatch(CPU), slow_loss)
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
