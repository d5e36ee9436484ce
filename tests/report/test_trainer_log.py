"""The log after a kill: half a line is dropped, later rows are cut, earlier bytes stay."""

import json

import pytest

from helpers.faults import raises_fault
from surefoot.report import trainer_log
from surefoot.report.trainer_log import append_row, cut_to_step, read_rows
from surefoot.system.errors import IntegrityError


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
