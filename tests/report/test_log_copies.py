"""The copies of the logs beside a checkpoint: what is edited, cut or lost is named with its line, and given back."""

import errno
import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.faults import gives, raises_fault
from surefoot.report import log_copies
from surefoot.report.events import EVENTS, append_event, cut_events
from surefoot.report.flight import FLIGHT, FlightRing
from surefoot.report.log_copies import LogCopies, check_logs, has_copies, mend_logs
from surefoot.report.trainer_log import NAME as LOG
from surefoot.report.trainer_log import append_row, cut_to_step
from surefoot.system import plain_files
from surefoot.training.report import StepReport

RUN_LOG = "run.log"
ALL = (LOG, EVENTS, RUN_LOG, FLIGHT)


class Run:
    """A run folder in which steps are logged, by hand."""

    def __init__(self, folder: Path):
        self.folder, self.copies, self.flight = folder, LogCopies(folder), FlightRing(folder, seed=1)
        self.step = 0

    def steps(self, number: int) -> None:
        for step in range(self.step + 1, self.step + 1 + number):
            append_row(self.folder / LOG, {"current_steps": step, "loss": 9.0 / step})
            self.flight.begins(step, [[step]])
            self.flight.add(StepReport(step, 9.0 / step, 0.5, 1e-3, 3, 4, (step,), "stepped", None, 0.1))
            with (self.folder / RUN_LOG).open("a") as file:
                file.write(f"step {step}\n")
        self.step += number

    def save(self, *, evaluated: bool = True) -> Path:
        checkpoint = self.folder / f"checkpoint-{self.step}"
        checkpoint.mkdir()
        self.copies.write(checkpoint, self.step, evaluated=evaluated)
        append_event(self.folder, "saved", self.step, f"saved {checkpoint.name}")
        return checkpoint

    def resume(self, step: int, *, evaluated: bool = True) -> None:
        """As a process does that goes on from the checkpoint of this step."""
        cut_to_step(self.folder / LOG, step, evaluated=evaluated)
        cut_events(self.folder, step, evaluated=evaluated)
        self.copies, self.flight, self.step = LogCopies(self.folder), FlightRing(self.folder, 1, step), step
        self.flight.begin()
        append_event(self.folder, "resume", step, f"resumed after step {step}")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    append_event(tmp_path, "start", 0, "started")
    return made


def faults(run: Path, checkpoint: Path) -> dict[str, str]:
    return {check.name: check.fault.what for check in check_logs(run, checkpoint) if check.fault}


def edited(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))


def test_every_checkpoint_vouches_for_the_logs_of_a_run_that_was_killed_cut_and_resumed(run):
    kept = []
    for _ in range(3):
        run.steps(3)
        kept.append(run.save())
        run.steps(2)  # these are lost by a kill
        append_event(run.folder, "failed", run.step, "it fell")
        append_event(run.folder, "spike", run.step, "cut on resume")
        run.resume(run.step - 2)
    for checkpoint in kept:
        assert {check.name for check in check_logs(run.folder, checkpoint)} == set(ALL)
        assert faults(run.folder, checkpoint) == {}


@pytest.mark.parametrize("name", ALL)
def test_one_digit_is_named_with_its_file_and_line_and_mended(run, name):
    run.steps(4)
    checkpoint = run.save()
    run.steps(2)
    path = run.folder / name
    before = path.read_bytes()
    place = {LOG: 2, EVENTS: 0, RUN_LOG: 2, FLIGHT: 5}[name]
    old, new = {LOG: ("3.0", "8.0"), EVENTS: ("started", "startet"), RUN_LOG: ("3", "8"), FLIGHT: ("3.0", "8.0")}[name]
    edited(path, lambda lines: [line.replace(old, new) if n == place else line for n, line in enumerate(lines)])
    assert path.read_bytes() != before
    assert list(faults(run.folder, checkpoint)) == [name]
    assert f"line {place + 1} " in faults(run.folder, checkpoint)[name]
    if name == LOG:
        assert all(gives(faults(run.folder, checkpoint)[name], value) for value in ("loss", "8.0", "3.0"))
    (told,) = mend_logs(run.folder, checkpoint)
    assert str(path) in told
    assert faults(run.folder, checkpoint) == {}
    later = {LOG, FLIGHT}  # cut to the checkpoint when the run goes on from it
    assert before.startswith(path.read_bytes()) if name in later else path.read_bytes() == before
    assert mend_logs(run.folder, checkpoint) == []


def test_twin_what_came_after_the_checkpoint_is_not_vouched_for(run):
    run.steps(4)
    checkpoint = run.save()
    run.steps(2)
    for name in (LOG, RUN_LOG, FLIGHT):
        edited(run.folder / name, lambda lines: [*lines[:-1], "{}\n"])
    assert faults(run.folder, checkpoint) == {}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("left", [None, 0, 1])
def test_a_log_that_was_cut_or_lost_is_told_and_mended(run, name, left):
    run.steps(4)
    run.save()
    run.steps(1)
    checkpoint = run.save()
    path = run.folder / name
    before = path.read_bytes()
    if left is None:
        path.unlink()
    else:
        edited(path, lambda lines: lines[:left])
    assert list(faults(run.folder, checkpoint)) == [name]
    assert len(mend_logs(run.folder, checkpoint)) == 1
    assert faults(run.folder, checkpoint) == {}
    if name != EVENTS:  # which has a line after the checkpoint
        assert path.read_bytes() == before


def test_lines_after_the_copy_survive_a_line_that_was_taken_out(run):
    run.steps(3)
    checkpoint = run.save()
    append_event(run.folder, "stopped", 3, "interrupted")
    before = (run.folder / EVENTS).read_text()
    edited(run.folder / EVENTS, lambda lines: lines[1:])
    assert mend_logs(run.folder, checkpoint)
    assert json.loads((run.folder / EVENTS).read_text().splitlines()[-1])["kind"] == "stopped"
    assert (run.folder / EVENTS).read_text().startswith(before.splitlines()[0])


def test_the_oldest_steps_of_the_flight_may_go_and_no_others(run, monkeypatch):
    monkeypatch.setattr("surefoot.report.flight.KEPT", 3)
    run.steps(5)
    checkpoint = run.save()
    run.steps(1)  # the file is cut to its last three steps
    lines = (run.folder / FLIGHT).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 5, 6]
    assert faults(run.folder, checkpoint) == {}
    edited(run.folder / FLIGHT, lambda lines: [lines[0], lines[2]])  # step 5
    assert list(faults(run.folder, checkpoint)) == [FLIGHT]


def test_an_evaluation_that_is_done_again_is_in_no_copy(run):
    """A signal asked for it, so the checkpoint of the step was written before the evaluation that is due."""
    run.steps(2)
    append_row(run.folder / LOG, {"current_steps": 2, "eval_loss": 1.0})
    checkpoint = run.save(evaluated=False)
    shutil.copytree(run.folder, run.folder.with_name("going on"))
    assert faults(run.folder.with_name("going on"), checkpoint) == {}  # the run goes on: the row stays
    run.resume(2, evaluated=False)
    assert faults(run.folder, checkpoint) == {}
    run.steps(2)
    assert faults(run.folder, run.save()) == {}


def test_what_is_read_once_is_not_read_again_and_a_log_that_became_shorter_is_seen(run):
    run.steps(3)
    run.save()
    (run.folder / RUN_LOG).write_text("")
    run.steps(2)
    checkpoint = run.save()
    assert list(faults(run.folder, checkpoint)) == [RUN_LOG]
    mend_logs(run.folder, checkpoint)
    assert (run.folder / RUN_LOG).read_text() == "".join(f"step {n}\n" for n in (1, 2, 3, 4, 5))


def test_a_checkpoint_of_an_earlier_version_vouches_for_nothing_and_a_torn_copy_is_told(run):
    run.steps(2)
    checkpoint = run.save()
    assert has_copies(checkpoint)
    (checkpoint / log_copies.NAME).write_bytes((checkpoint / log_copies.NAME).read_bytes()[:700])
    with raises_fault("SF-CHECKPOINT-DAMAGED", checkpoint / log_copies.NAME):
        check_logs(run.folder, checkpoint)
    (checkpoint / log_copies.NAME).unlink()
    assert not has_copies(checkpoint)
    assert mend_logs(run.folder, checkpoint) == []


def test_copies_that_the_disk_does_not_give_are_unreadable_and_not_damaged(run, monkeypatch):
    run.steps(2)
    checkpoint = run.save()

    def refused(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(log_copies.tarfile, "open", refused)
    with raises_fault("SF-FILE-UNREADABLE", checkpoint / log_copies.NAME):
        check_logs(run.folder, checkpoint)

    def garbled(path):
        raise gzip.BadGzipFile("CRC check failed")  # an OSError that no disk raised

    monkeypatch.setattr(log_copies.tarfile, "open", garbled)
    with raises_fault("SF-CHECKPOINT-DAMAGED", checkpoint / log_copies.NAME):
        check_logs(run.folder, checkpoint)


def test_equal_logs_make_equal_bytes(run, tmp_path):
    run.steps(3)
    first = run.save()
    again = tmp_path / "again"
    again.mkdir()
    edited(run.folder / EVENTS, lambda lines: lines[:-1])  # as it was
    LogCopies(run.folder).write(again, 3, evaluated=True)
    assert (again / log_copies.NAME).read_bytes() == (first / log_copies.NAME).read_bytes()


@pytest.mark.parametrize("limited", [False, True], ids=["", "twin: as other files are read"])
def test_a_log_of_any_size_is_read_whole(run, monkeypatch, limited):
    """What is not read would not be written again."""
    monkeypatch.setattr(plain_files.read_bytes, "__defaults__", (100,))
    if limited:
        monkeypatch.setattr(log_copies, "_MOST", 100)
    run.steps(20)
    checkpoint = run.save()
    before = (run.folder / LOG).read_bytes()
    assert len(before) > 100
    assert (faults(run.folder, checkpoint) == {}) is not limited
    mend_logs(run.folder, checkpoint)
    assert (run.folder / LOG).read_bytes() == before
