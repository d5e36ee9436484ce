"""Only a regular file of a bearable size is read, and nothing is waited for."""

import errno
import os
import signal
from pathlib import Path

import pytest

from surefoot.system import plain_files
from surefoot.system.plain_files import MOST, read_bytes, read_text


def test_a_file_is_read_and_so_is_what_a_link_leads_to(tmp_path):
    path = tmp_path / "a"
    path.write_bytes("é\r\nb\rc".encode())
    (tmp_path / "link").symlink_to(path)
    assert read_bytes(path) == path.read_bytes()
    assert read_text(tmp_path / "link") == path.read_text(encoding="utf-8") == "é\nb\nc"


@pytest.mark.skipif(os.name != "posix", reason="FIFOs and devices")
def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="regular") as caught:
            read_bytes(path)
        assert caught.value.errno == errno.EINVAL
    with pytest.raises(IsADirectoryError):
        read_bytes(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "gone")


def test_a_file_of_holes_is_refused_unread(tmp_path):
    os.truncate(os.open(tmp_path / "large", os.O_CREAT | os.O_WRONLY), MOST + 1)
    with pytest.raises(OSError, match="512"):
        read_bytes(tmp_path / "large")


def test_a_file_that_grows_while_it_is_read_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"x" * 100)
    size = os.fstat
    monkeypatch.setattr(plain_files.os, "fstat", lambda handle: os.stat_result((*size(handle)[:6], 10, 0, 0, 0)))
    with pytest.raises(OSError, match="is larger"):
        read_bytes(tmp_path / "a", most=50)
    assert read_bytes(tmp_path / "a", most=100) == b"x" * 100


def test_twin_a_plain_open_waits_for_a_fifo(tmp_path, monkeypatch):
    def stop(number, frame):
        raise TimeoutError

    os.mkfifo(tmp_path / "fifo")
    monkeypatch.setattr(plain_files, "_NO_WAIT", 0)
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(TimeoutError):
            read_bytes(tmp_path / "fifo")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
