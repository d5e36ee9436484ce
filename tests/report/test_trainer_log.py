"""Rows keep every digit and say "not finite" instead of a number; after a kill half a line and later rows are cut."""

import dataclasses
import json
import math

import pytest
from transformers import TrainerState

from helpers.faults import raises_fault
from surefoot.report import trainer_log
from surefoot.report.pace import Timing
from surefoot.report.trainer_log import (
    Position,
    append_row,
    cut_to_step,
    eval_row,
    read_rows,
    train_row,
    trainer_state,
    without_timing,
)
from surefoot.system.errors import IntegrityError
from surefoot.training.report import EvalReport, StepProfile, StepReport


def train(step):
    return {"current_steps": step, "loss": 1.0 / step}


def evaluation(step):
    return {"current_steps": step, "eval_loss": 2.0 / step}


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "trainer_log.jsonl"
    for row in (train(1), train(2), evaluation(2), train(3), train(4), evaluation(4)):
        append_row(path, row)
    return path


def test_no_file_no_rows(tmp_path):
    assert read_rows(tmp_path / "absent") == []


def test_rows_come_back_as_written(log):
    assert read_rows(log)[:3] == [train(1), train(2), evaluation(2)]


@pytest.mark.parametrize("torn", ['{"current_ste', '{"current_steps": 5, "loss": 0.2', "\0\0\0"])
def test_a_torn_last_line_is_dropped(log, torn):
    with log.open("a") as file:
        file.write(torn)
    assert len(read_rows(log)) == 6
    cut_to_step(log, 9, evaluated=True)
    append_row(log, train(5))
    assert read_rows(log)[-1] == train(5)


def test_twin_appending_without_the_cut_loses_a_row(log):
    with log.open("a") as file:
        file.write('{"current_ste')
    append_row(log, train(5))
    with pytest.raises(IntegrityError):
        read_rows(log)


def test_a_damaged_line_inside_is_named(log):
    lines = log.read_text().splitlines()
    lines[2] = "{half"
    log.write_text("\n".join(lines) + "\n")
    with raises_fault("SF-FILE-UNREADABLE", f"{log}:3"):
        read_rows(log)


def test_a_last_line_that_lacks_only_its_end_counts(log):
    log.write_text(log.read_text().rstrip("\n"))
    assert len(read_rows(log)) == 6


def test_the_cut_keeps_earlier_lines_byte_for_byte(log):
    before = log.read_text().splitlines(keepends=True)
    kept = cut_to_step(log, 2, evaluated=True)
    assert kept == [train(1), train(2), evaluation(2)]
    assert log.read_text() == "".join(before[:3])


def test_an_evaluation_that_will_be_done_again_is_cut(log):
    cut_to_step(log, 2, evaluated=False)
    assert read_rows(log) == [train(1), train(2)]


def test_a_cut_of_nothing_leaves_an_empty_log(tmp_path):
    assert cut_to_step(tmp_path / "trainer_log.jsonl", 0, evaluated=False) == []


def test_no_nan_in_the_file(log):
    with pytest.raises(ValueError):
        append_row(log, {"current_steps": 5, "loss": float("nan")})
    assert [json.loads(line) for line in log.read_text().splitlines()] == read_rows(log)


DAMAGED = {
    "no step": {"loss": 1.0},
    "a word for the step": {"current_steps": "3"},
    "true for the step": {"current_steps": True},
    "a word for the loss": {"current_steps": 3, "loss": "low"},
    "no time": {"current_steps": 3, "elapsed_time": "soon"},
    "a number for the time": {"current_steps": 3, "elapsed_time": 5},
}


@pytest.mark.parametrize("row", DAMAGED.values(), ids=DAMAGED)
def test_a_line_that_is_no_row_is_named_before_a_run_counts_on_from_it(log, row):
    append_row(log, row)
    append_row(log, train(5))
    with raises_fault("SF-FILE-UNREADABLE", f"{log}:7"):
        cut_to_step(log, 9, evaluated=True)


def test_twin_unlooked_at_they_are_taken(log, monkeypatch):
    monkeypatch.setattr(trainer_log, "_is_row", lambda record: True)
    append_row(log, DAMAGED["a word for the loss"])
    append_row(log, train(5))
    assert cut_to_step(log, 9, evaluated=True)[-2]["loss"] == "low"


POSITION = Position(total_steps=1000, epoch=0.36, total_tokens=421_440, total_weight=49_320)
TIMING = Timing(
    elapsed=41.2, remaining=300.0, throughput=3512.3, supervised_throughput=411.0, peak_memory=1_234_567_890
)
STEP = StepReport(
    step=120,
    loss=1.2345678901234567,
    grad_norm=0.1 + 0.2,
    lr=9.1e-05,
    weight=411,
    tokens=3512,
    examples=(3, 17),
    decision="stepped",
    non_finite=None,
    seconds=1.0,
)
EVALUATION = EvalReport(step=120, loss=1.301, perplexity=math.exp(1.301), accuracy=0.612, weight=4012, seconds=2.1)


def test_the_names_that_readers_of_llama_factory_logs_know():
    row = train_row(STEP, POSITION, TIMING)
    known = {"current_steps", "total_steps", "loss", "lr", "epoch", "percentage", "elapsed_time", "remaining_time"}
    assert known | {"throughput", "total_tokens"} <= row.keys()
    assert row["percentage"] == 12.0
    assert row["elapsed_time"] == "0:00:41"
    assert row["remaining_time"] == "0:05:00"
    assert row["total_tokens"] == 421_440


def test_floats_survive_the_file_bit_for_bit():
    row = json.loads(json.dumps(train_row(STEP, POSITION, TIMING)))
    assert row["loss"] == STEP.loss
    assert row["grad_norm"] == STEP.grad_norm
    assert round(STEP.loss, 6) != STEP.loss  # the twin: what a rounding writer would have kept


def test_a_train_row_has_no_eval_loss_and_an_evaluation_row_no_loss():
    assert "eval_loss" not in train_row(STEP, POSITION, TIMING)
    assert "loss" not in eval_row(EVALUATION, POSITION, TIMING)


@pytest.mark.parametrize("which", ["loss", "grad_norm"])
def test_non_finite_is_null_and_named(which):
    report = dataclasses.replace(STEP, loss=None if which == "loss" else 1.0, grad_norm=None)
    row = train_row(dataclasses.replace(report, decision="non_finite", non_finite=which), POSITION, TIMING)
    assert row["loss"] == (None if which == "loss" else 1.0)
    assert (row["non_finite"], row["skipped"], row["grad_norm"]) == (which, "non_finite", None)
    json.dumps(row, allow_nan=False)


def test_a_scaler_skip_keeps_its_finite_loss():
    report = dataclasses.replace(STEP, decision="scaler", grad_norm=None, non_finite="grad_norm", scale=65536.0)
    row = train_row(report, POSITION, TIMING)
    assert (row["loss"], row["skipped"], row["scale"]) == (STEP.loss, "scaler", 65536.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_evaluation_is_no_number(value):
    row = eval_row(dataclasses.replace(EVALUATION, loss=value, perplexity=value), POSITION, TIMING)
    assert (row["eval_loss"], row["eval_perplexity"], row["non_finite"]) == (None, None, "eval_loss")
    with pytest.raises(ValueError):  # the twin: the raw value is no JSON
        json.dumps({"eval_loss": value}, allow_nan=False)


def test_two_runs_of_different_speed_agree_without_timing():
    slow = Timing(elapsed=900.0, remaining=None, throughput=1.0, supervised_throughput=0.1, peak_memory=7)
    for make, report in ((train_row, STEP), (eval_row, EVALUATION)):
        a, b = make(report, POSITION, TIMING), make(report, POSITION, slow)
        assert a != b
        assert without_timing(a) == without_timing(b)
    late = dataclasses.replace(EVALUATION, seconds=99.0)
    assert without_timing(eval_row(late, POSITION, TIMING)) == without_timing(eval_row(EVALUATION, POSITION, TIMING))


def test_timing_fields_hide_nothing_that_the_run_computed():
    changed = dataclasses.replace(STEP, loss=math.nextafter(STEP.loss, 2.0))
    assert without_timing(train_row(STEP, POSITION, TIMING)) != without_timing(train_row(changed, POSITION, TIMING))


def state_of(logged):
    return trainer_state(
        logged,
        step=120,
        total_steps=1000,
        epoch=0.36,
        epochs=3.0,
        total_tokens=421_440,
        batch_size=16,
        log_every=1,
        best_step=120,
        best_value=1.301,
    )


def test_transformers_reads_the_trainer_state(tmp_path):
    logged = [train_row(STEP, POSITION, TIMING), eval_row(EVALUATION, POSITION, TIMING)]
    path = tmp_path / "trainer_state.json"
    path.write_text(json.dumps(state_of(logged)))
    state = TrainerState.load_from_json(str(path))
    assert (state.global_step, state.max_steps, state.num_train_epochs) == (120, 1000, 3)
    assert (state.best_metric, state.best_model_checkpoint) == (1.301, "checkpoint-120")
    train, evaluation = state.log_history
    assert train == {
        "step": 120,
        "epoch": 0.36,
        "loss": STEP.loss,
        "grad_norm": STEP.grad_norm,
        "learning_rate": 9.1e-05,
    }
    assert evaluation["eval_loss"] == 1.301


def test_equal_runs_have_equal_trainer_states():
    slow = dataclasses.replace(TIMING, elapsed=1e6, throughput=0.1)
    assert state_of([train_row(STEP, POSITION, TIMING)]) == state_of([train_row(STEP, POSITION, slow)])


def test_a_row_says_whether_its_step_was_clocked_or_traced():
    clocked = dataclasses.replace(STEP, profile=StepProfile(1.0, 2.0, 1, None))
    traced = dataclasses.replace(STEP, traced=True)
    marks = [train_row(one, POSITION, TIMING).get("profiled") for one in (STEP, clocked, traced)]
    assert marks == [None, "clocked", "traced"]
    assert trainer_log.without_timing(train_row(traced, POSITION, TIMING)) == trainer_log.without_timing(
        train_row(STEP, POSITION, TIMING)
    )


def test_every_timing_field_is_one_that_rows_have():
    written = (
        train_row(dataclasses.replace(STEP, traced=True), POSITION, TIMING).keys()
        | eval_row(EVALUATION, POSITION, TIMING).keys()
    )
    assert written >= trainer_log.TIMING_FIELDS


@pytest.mark.parametrize("unit", trainer_log.UNITS)
def test_a_row_says_what_its_loss_is_a_mean_over(unit):
    metrics = {"reward_margin": 0.25}
    perplexity = math.exp(1.301) if unit == "tokens" else None
    report = dataclasses.replace(EVALUATION, unit=unit, perplexity=perplexity, accuracy=None, metrics=metrics)
    row = eval_row(report, dataclasses.replace(POSITION, unit=unit), TIMING)
    assert row[f"eval_{unit}"] == 4012
    assert ("eval_perplexity" in row) == (unit == "tokens")
    assert trainer_log.eval_report(row) == report
    step = train_row(dataclasses.replace(STEP, metrics=metrics), dataclasses.replace(POSITION, unit=unit), TIMING)
    assert step[trainer_log.weight_field(unit)] == STEP.weight
    assert step[f"total_{trainer_log.weight_field(unit)}"] == POSITION.total_weight
    assert trainer_log.step_metrics(step) == ["reward_margin"]
    assert trainer_log.unit_of([step]) == trainer_log.unit_of([row]) == unit
    assert trainer_log.metric_fields(row) == ["eval_reward_margin"]
