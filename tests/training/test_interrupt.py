"""Real signals to a real process: the first asks, the second kills."""

import signal
import subprocess
import sys
import threading
import time

import pytest

from surefoot.training.interrupt import StopRequest

PROGRAM = """
import time
from surefoot.training.interrupt import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not (stop.requested and {obey}):
        time.sleep(0.01)
        if requests := sorted(stop.take_requests()):
            print("wished", *requests, flush=True)
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
    assert f"{number.name}: " in err


def test_the_second_signal_stops_at_once():
    process = start(obey=False)
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM: " in process.stderr.readline() + process.stderr.readline()
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert err.strip().startswith("SIGTERM again")


@pytest.mark.parametrize(("number", "wish"), [(signal.SIGUSR1, "save"), (signal.SIGUSR2, "evaluate")])
def test_a_wish_is_heard_once_and_stops_nothing(number, wish):
    process = start(obey=True)
    process.send_signal(number)
    assert process.stdout.readline() == f"wished {wish}\n"
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=20)
    assert out == "left after SIGTERM\n"
    assert f"{number.name}: " in err


def test_on_another_thread_nothing_is_asked_and_nothing_breaks():
    found = []

    def work():
        with StopRequest() as stop:
            found.append((stop.requested, stop.take_requests()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(None, frozenset())]
