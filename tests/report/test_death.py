"""How the last process of a run ended: by itself, in a step, between two, or in native code, and at which line."""

import faulthandler
import os
import subprocess
import sys

import pytest

from helpers.faults import gives, raises_fault
from surefoot.report.death import (
    LOG,
    CrashTraces,
    death_in_a_step,
    find_death,
    read_trace,
    resumed_sentence,
    trace_at_end,
)
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


CHILD = """
import ctypes, faulthandler, os, sys
from pathlib import Path
from surefoot.report.death import CrashTraces

def crash():
    {act}

{before}
with CrashTraces() as traces:
    with traces.into(Path(sys.argv[1])):
        {inside}
    {outside}
"""


def ended(log, *, act="ctypes.string_at(0)", before="", inside="crash()", outside="pass"):
    code = CHILD.format(act=act, before=before, inside=inside, outside=outside)
    done = subprocess.run([sys.executable, "-c", code, str(log)], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.log"
    path.write_text("2026-11-22 said before\n")
    return path


@pytest.mark.parametrize(
    ("act", "number", "signal"),
    [("ctypes.string_at(0)", 11, "SIGSEGV"), ("os.abort()", 6, "SIGABRT"), ("os.kill(os.getpid(), 7)", 7, "SIGBUS")],
)
def test_a_crash_leaves_its_line_at_the_end_of_the_file(log, act, number, signal):
    code, said = ended(log, act=act)
    assert code == -number
    assert "Fatal" not in said
    found = trace_at_end(log)
    assert found.signal == signal
    place = "string_at, line" if number == 11 else "crash, line 7 of <string>"
    assert place in found.place
    assert log.read_text().startswith("2026-11-22 said before\n")
    with log.open("a") as file:
        file.write("2026-11-22 the next process\n")
    assert trace_at_end(log) is None  # twin: another one has come since


@pytest.mark.parametrize("inside", ["os.kill(os.getpid(), 9)", "pass"])
def test_a_killed_process_and_one_that_ends_leave_nothing(log, inside):
    code, said = ended(log, inside=inside)
    assert (code, said) == (-9 if "9" in inside else 0, "")
    assert log.read_text() == "2026-11-22 said before\n"


def test_before_and_after_the_block_the_screen_has_it(log):
    code, said = ended(log, inside="pass", outside="crash()")
    assert code == -11
    assert read_trace(said).signal == "SIGSEGV"
    assert trace_at_end(log) is None


def test_a_handler_that_is_there_already_stands(log):
    code, said = ended(log, before="faulthandler.enable()")
    assert code == -11
    assert "string_at" in read_trace(said).place
    assert trace_at_end(log) is None


def test_the_handler_goes_with_the_block(tmp_path):
    was = faulthandler.is_enabled()
    with CrashTraces():
        assert faulthandler.is_enabled()
    assert faulthandler.is_enabled() == was


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        ("Segmentation fault\n", None),
        ("Fatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n  <no Python frame>\n", ("SIGABRT", "")),
        ("Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  <no Pyth", ("SIGABRT", "")),
        (
            'Fatal Python error: none_dealloc\nCurrent thread 0x1 (x):\n  File "a b.py", line 3 in f\n',
            ("none_dealloc", "f"),
        ),
    ],
)
def test_what_is_half_or_strange_is_read_as_far_as_it_goes(tmp_path, text, found):
    trace = read_trace(text)
    assert (trace and (trace.signal, trace.place.partition(",")[0])) == found
    assert not (found and found[1]) or trace.place.endswith("a b.py")
    path = tmp_path / "log"
    path.write_text(text)
    assert trace_at_end(path) == trace
    assert trace_at_end(tmp_path / "none") is None
    path.write_text(f"said: {text}")  # within a line of somebody's
    assert trace_at_end(path) is None
