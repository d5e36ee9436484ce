"""How the last process of a run ended: by itself, in a step, or between two."""

import os

import pytest

from helpers.faults import gives, raises_fault
from surefoot.report.death import LOG, death_in_a_step, find_death, resumed_sentence
from surefoot.report.events import append_event
from surefoot.report.flight import FlightRing
from surefoot.system.durable import LOCK
from surefoot.training.report import StepReport

TRACE = """Fatal Python error: Segmentation fault

Current thread 0x1 (most recent call first):
  File "k.py", line 9 in go
"""


def done(step):
    return StepReport(step, 1.0, 0.5, 1e-3, 9, 40, (step,), "stepped", None, 0.25)


@pytest.fixture
def run(tmp_path):
    """Killed in step 3."""
    append_event(tmp_path, "start", 0, "started: 6 steps")
    ring = FlightRing(tmp_path, 42)
    for step in (1, 2):
        ring.begins(step, [(step,)])
        ring.add(done(step))
    ring.begins(3, [(3,)])
    return tmp_path


def test_the_step_of_a_killed_process(run):
    death = death_in_a_step(run)
    assert (death.step, death.done, death.begun["examples"], death.trace) == (3, 2, [3], None)
    said = resumed_sentence(death, run, 2)
    assert all(part in said for part in (str(death), "checkpoint-2", f"`surefoot replay {run}`"))
    (run / LOG).write_text(f"2026-11-22 saved checkpoint-2\n{TRACE}")
    trace = death_in_a_step(run).trace
    assert trace.signal == "SIGSEGV"
    assert all(gives(trace.place, one) for one in ("go", 9, "k.py"))


@pytest.mark.parametrize("kind", ["stopped", "diverged", "published"])
def test_twin_one_that_ended_by_itself(run, kind):
    append_event(run, kind, 2, "as it says")
    assert find_death(run) is None
    with raises_fault("SF-REPLAY", run):
        death_in_a_step(run)


def test_twin_one_that_died_in_no_step(run):
    FlightRing(run, 42).add(done(3))
    death = find_death(run)
    assert (death.step, death.done) == (None, 3)
    assert "surefoot replay" not in resumed_sentence(death, run, 0)
    with raises_fault("SF-REPLAY", run):
        death_in_a_step(run)


def test_an_error_of_a_step_without_a_folder_counts_and_one_with_does_not(run):
    append_event(run, "failed", 2, "AcceleratorError: CUDA error: an illegal memory access was encountered")
    assert death_in_a_step(run).error.startswith("AcceleratorError: ")
    kept = run / "failure-3"
    kept.mkdir()
    (kept / "MANIFEST.json").write_text("{}")
    assert find_death(run) is None
    with raises_fault("SF-REPLAY", run, remedy=[kept]):
        death_in_a_step(run)


def test_a_run_at_work_is_left_alone(run):
    (run / LOCK).write_text(f"process {os.getpid()} on {os.uname().nodename}")
    with raises_fault("SF-FOLDER-BUSY", run):
        death_in_a_step(run)


def test_a_folder_without_a_process(tmp_path):
    assert find_death(tmp_path) is None
