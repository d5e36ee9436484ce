"""Durations and warm-up as steps; a warm-up of transformers' schedules as transformers counts it."""

import pytest
from transformers import TrainingArguments

from helpers.faults import raises_fault
from surefoot.config.schema import RunConfig
from surefoot.config.types import Duration
from surefoot.runs import prepared
from surefoot.runs.prepared import Timetable, make_schedule, make_timetable


def table(duration, eval_every="1 epoch", save_every="200 steps", steps_per_epoch=10, tokens=lambda step: 7):
    parse = Duration.parse
    return make_timetable(
        parse(duration), parse(eval_every) if eval_every else None, parse(save_every), steps_per_epoch, tokens
    )


@pytest.mark.parametrize(
    ("duration", "total"),
    [("25 steps", 25), ("3 epochs", 30), ("0.25 epochs", 2), ("0.01 epochs", 1), ("70 tokens", 10), ("71 tokens", 11)],
)
def test_total(duration, total):
    assert table(duration).total_steps == total


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        ("4 steps", {4, 8, 12, 15}),
        ("1 epoch", {10, 15}),
        ("0.5 epochs", {5, 10, 15}),
        ("0.01 epochs", set(range(1, 16))),
        ("30 tokens", {5, 9, 13, 15}),
        ("5 tokens", set(range(1, 16))),
        ("100 steps", {15}),
    ],
)
def test_due_steps_end_with_the_last(every, steps):
    assert table("15 steps", eval_every=every).eval_steps == steps
    assert table("15 steps", save_every=every).save_steps == steps


def test_without_an_interval_only_the_end_is_evaluated():
    assert table("15 steps", eval_every=None).eval_steps == {15}


@pytest.mark.parametrize("length", ["1e20 epochs", "1e308 epochs", "1e12 steps", "1e15 tokens", "1e308 tokens"])
def test_a_length_that_nobody_can_wait_for_is_refused_at_once(length):
    with raises_fault("SF-CONFIG-CONFLICT", "duration"):
        table(length)
    assert table("15 steps", eval_every=length, save_every=length).eval_steps == {15}, "a late event only ends the run"


@pytest.mark.parametrize("most", [14, 15])
def test_twin_the_limit_is_the_longest_length(most, monkeypatch):
    monkeypatch.setattr(prepared, "_MOST", most)
    if most == 15:
        assert table("15 steps").total_steps == table("105 tokens").total_steps == 15
    else:
        for length in ("15 steps", "105 tokens", "1.5 epochs"):
            with raises_fault("SF-CONFIG-CONFLICT", "duration"):
                table(length)


def test_epoch_is_fractional():
    assert table("15 steps").epoch(15) == 1.5


def test_lengths_are_not_asked_for_unless_tokens_are_meant():
    def forbidden(step):
        raise AssertionError("reads every length of the data set")

    assert table("3 epochs", tokens=forbidden).total_steps == 30


def test_an_evaluation_at_the_start_is_at_step_0():
    table = make_timetable(Duration(4, "steps"), Duration(2, "steps"), Duration(4, "steps"), 4, int, eval_at_start=True)
    assert table.eval_steps == {0, 2, 4}
    assert table.save_steps == {4}


def warmup(share: float, total: int, *, from_zero: bool) -> int:
    config = RunConfig.model_validate(
        {
            "stage": "sft",
            "model": "m",
            "data": {"train": "d.json"},
            "optim": {"warmup": share, "warmup_from_zero": from_zero},
            "output": "out",
        }
    )
    timetable = Timetable(total, total, frozenset(), frozenset())
    return make_schedule(config, None, timetable).warmup  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("share", [0.01, 0.03, 0.1, 0.15, 1 / 3])
@pytest.mark.parametrize("total", [1, 7, 25, 30, 333])
def test_as_transformers_rounds(share, total, tmp_path):
    theirs = TrainingArguments(output_dir=str(tmp_path), warmup_steps=share, use_cpu=True)
    assert warmup(share, total, from_zero=True) == theirs.get_warmup_steps(total)


def test_twin_our_own_warm_up_takes_the_nearest():
    assert (warmup(0.1, 23, from_zero=False), warmup(0.1, 23, from_zero=True)) == (2, 3)
