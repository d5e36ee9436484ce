"""Real signals to a real process: the first asks, the second kills."""

import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import time
from surefoot.training.interrupt import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not (stop.requested and {obey}):
        time.sleep(0.01)
    print("left after", stop.requested, flush=True)
"""


def start(obey):
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(obey=obey)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks(number):
    process = start(obey=True)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == f"left after {number.name}\n"
    assert "stopping after this step" in err


def test_the_second_signal_stops_at_once():
    process = start(obey=False)
    process.send_signal(signal.SIGTERM)
    assert "stopping after this step" in process.stderr.readline() + process.stderr.readline()
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
