"""What a process is told of the time in which others ran."""

import subprocess
import sys

import pytest

SPIN = "import os, sys, time\nos.sched_setaffinity(0, {int(sys.argv[1])})\n"
BUSY = SPIN + "while True: pass"
LOOK = (
    SPIN
    + """
from surefoot.system.counters import read_counters
before, end = read_counters(), time.monotonic() + 1
while time.monotonic() < end: pass
print(read_counters().since(before).waited)
"""
)


def waited(core: int) -> float:
    """Seconds, of one in which a process computes on `core`."""
    return float(subprocess.check_output([sys.executable, "-c", LOOK, str(core)], text=True))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts it")
def test_waiting_for_a_processor_is_counted():
    """Two others want the same core."""
    import os

    core = min(os.sched_getaffinity(0))
    others = [subprocess.Popen([sys.executable, "-c", BUSY, str(core)]) for _ in range(2)]
    try:
        beside = waited(core)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert beside > 0.3, "a third of the time is its own where it runs beside two"
