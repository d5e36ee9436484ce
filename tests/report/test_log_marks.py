"""What a checkpoint has of a run's texts: their size and hash, by which a resumed run checks and cuts them."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.faults import raises_fault
from surefoot.report import journal, log_marks
from surefoot.report.events import ANSWERS, SAMPLES, append_answers, append_samples, cut_events
from surefoot.report.log_copies import LogCopies, check_logs
from surefoot.report.log_marks import LogMarks, check_marks, cut_to_marks, require_marks
from surefoot.system import plain_files


class Run:
    """A run folder in which answers are drawn and samples written, by hand."""

    def __init__(self, folder: Path):
        self.folder, self.step = folder, 0
        self.marks = LogMarks(folder)

    def steps(self, number: int) -> None:
        for step in range(self.step + 1, self.step + 1 + number):
            append_answers(self.folder, [{"step": step, "answer": f"{'é' * member}{step}"} for member in range(3)])
        self.step += number

    def save(self, *, evaluated: bool = True) -> Path:
        checkpoint = self.folder / f"checkpoint-{self.step}"
        checkpoint.mkdir()
        self.marks.write(checkpoint, self.step, evaluated=evaluated)
        return checkpoint

    def resume(self, checkpoint: Path) -> list[str]:
        require_marks(self.folder, checkpoint)
        told = cut_to_marks(self.folder, checkpoint)
        self.step = int(checkpoint.name.partition("-")[2])
        self.marks = LogMarks(self.folder)
        return told

    @property
    def answers(self) -> bytes:
        return (self.folder / ANSWERS).read_bytes()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def faults(run: Run, checkpoint: Path) -> dict[str, str]:
    return {check.name: check.fault.code for check in check_marks(run.folder, checkpoint) if check.fault}


def test_a_mark_is_the_size_and_the_hash_of_the_file_as_it_was(run, monkeypatch):
    monkeypatch.setattr(log_marks, "_CHUNK", 7)
    for number in (1, 4, 2):
        run.steps(number)
        mark = json.loads((run.save() / log_marks.NAME).read_text())
        assert mark == {ANSWERS: {"size": len(run.answers), "sha256": hashlib.sha256(run.answers).hexdigest()}}


def test_a_checkpoint_does_not_grow_with_the_answers(run):
    run.steps(2)
    LogCopies(run.folder).write(first := run.save(), 2, evaluated=True)
    run.steps(2000)
    LogCopies(run.folder).write(last := run.save(), 2002, evaluated=True)
    sizes = [sum(path.stat().st_size for path in one.iterdir()) for one in (first, last)]
    assert abs(sizes[1] - sizes[0]) < 10  # digits of the size
    assert check_logs(run.folder, last) == []


def test_a_run_goes_on_from_any_checkpoint_with_the_same_bytes(run):
    run.steps(3)
    older = run.save()
    run.steps(3)
    newer, wanted = run.save(), run.answers
    for checkpoint in (newer, older):
        run.steps(2)  # lost by a kill
        append_answers(run.folder, [{"step": 1, "answer": "asked for before the checkpoint and scored after it"}])
        with (run.folder / ANSWERS).open("a") as file:
            file.write('{"step": 9, "ans')  # and a power failure
        assert faults(run, checkpoint) == {}
        assert run.resume(checkpoint) == []
        cut_events(run.folder, run.step, evaluated=True)
        run.steps(6 - run.step)
        assert run.answers == wanted
    run.steps(1)
    assert faults(run, run.save()) == {}


CHANGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "changed": lambda path: path.write_bytes(path.read_bytes().replace(b"2", b"3", 1)),
    "a link": lambda path: path.rename(path.with_suffix(".moved")) and path.symlink_to(path.with_suffix(".moved")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_is_not_as_it_was_is_an_error_and_is_left_alone(run, change):
    run.steps(3)
    checkpoint = run.save()
    path = run.folder / ANSWERS
    before = run.answers
    CHANGES[change](path)
    there = path.read_bytes() if path.exists() else None
    assert faults(run, checkpoint) == {ANSWERS: "SF-CHECKPOINT-DAMAGED"}
    with raises_fault("SF-CHECKPOINT-DAMAGED", path, f"{len(before):,}", checkpoint.name, remedy=[path]):
        require_marks(run.folder, checkpoint)
    assert (path.read_bytes() if path.exists() else None) == there
    path.unlink(missing_ok=True)
    path.write_bytes(before)  # as the message says
    require_marks(run.folder, checkpoint)


def test_twin_what_follows_the_mark_may_change(run):
    run.steps(3)
    checkpoint, size = run.save(), len(run.answers)
    run.steps(1)
    (run.folder / ANSWERS).write_bytes(run.answers[:size] + b"anything")
    assert faults(run, checkpoint) == {}


def test_an_empty_file_in_its_place_lets_the_run_go_on(run):
    run.steps(3)
    checkpoint = run.save()
    (run.folder / ANSWERS).write_bytes(b"")
    assert faults(run, checkpoint) == {ANSWERS: "SF-CHECKPOINT-DAMAGED"}  # as `surefoot verify` tells
    (told,) = run.resume(checkpoint)
    assert str(run.folder / ANSWERS) in told
    run.steps(1)
    assert faults(run, run.save()) == {}
    assert [line["step"] for line in map(json.loads, run.answers.splitlines())] == [4, 4, 4]


def test_a_file_that_was_emptied_during_the_run_is_marked_as_it_is(run):
    run.steps(5)
    run.save()
    (run.folder / ANSWERS).write_bytes(b"")
    run.steps(1)
    assert faults(run, run.save()) == {}


def test_samples_of_an_evaluation_that_is_done_again_are_not_marked(run):
    """A signal asked for it, so the checkpoint of the step was written before the evaluation that is due."""
    for run.step in (2, 4):
        append_samples(run.folder, run.step, [("say", "heron"), ("say", "owl")])
    checkpoint = run.save(evaluated=False)
    run.resume(checkpoint)
    assert [line["step"] for line in map(json.loads, (run.folder / SAMPLES).open())] == [2, 2]


@pytest.mark.parametrize("block", [3, 1 << 16])
def test_texts_of_any_size_are_cut_by_their_steps(run, monkeypatch, block):
    """Of checkpoints without marks, and before the first one."""
    monkeypatch.setattr(plain_files.read_bytes, "__defaults__", (100,))
    monkeypatch.setattr(journal, "_BLOCK", block)
    run.steps(8)
    whole = run.answers
    with (run.folder / ANSWERS).open("a") as file:
        file.write("[1]\nnonsense\n")
    cut_events(run.folder, 8, evaluated=True)
    assert run.answers == whole
    cut_events(run.folder, 5, evaluated=True)
    assert run.answers == b"".join(whole.splitlines(keepends=True)[:15])
    cut_events(run.folder, 0, evaluated=False)
    assert run.answers == b""
