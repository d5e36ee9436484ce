"""Where Python was when native code ended its process: at the end of the file that was named, and nowhere else."""

import faulthandler
import subprocess
import sys

import pytest

from surefoot.report.crash_trace import CrashTraces, read_trace, trace_at_end

CHILD = """
import ctypes, faulthandler, os, sys
from pathlib import Path
from surefoot.report.crash_trace import CrashTraces

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
