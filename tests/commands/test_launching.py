"""What the launcher of several ranks leaves behind."""

import subprocess
import sys
import threading

import pytest

from surefoot.commands import launching

_ENDS_WITH_3 = "import os, sys, time; print('error: so', file=sys.stderr); "
_ENDS_WITH_3 += "sys.exit(3) if os.environ['RANK'] == '0' else time.sleep(600)"


@pytest.fixture
def left(monkeypatch, tmp_path) -> list[int | None]:
    """How a rank that had to be killed stood when the launcher returned, where a kill takes its time: the kernel has
    to take down what a process held."""
    ranks: list[subprocess.Popen[bytes]] = []
    started, killed = subprocess.Popen, subprocess.Popen.kill

    def start(command, **more):
        ranks.append(started([sys.executable, "-c", _ENDS_WITH_3], **more))
        return ranks[-1]

    monkeypatch.setattr(launching.subprocess, "Popen", start)
    monkeypatch.setattr(started, "kill", lambda process: threading.Timer(0.5, killed, [process]).start())
    monkeypatch.setattr(launching, "_AFTER_ERROR", 0.2)
    assert launching.start_ranks(2, [], tmp_path / "run") == 3
    return [rank.returncode for rank in ranks]


def test_no_rank_outlives_the_launcher(left):
    assert left == [3, -9]


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(launching._Child, "await_end", lambda child: None)


def test_twin_a_launcher_that_does_not_wait_is_seen(hasty, left):
    assert left == [3, None]
