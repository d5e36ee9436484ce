"""One process works in a folder at a time, and a lock outlives nobody."""

import errno
import os

import pytest

from helpers.faults import raises_fault
from surefoot.system import disk, folder_lock
from surefoot.system.errors import EnvironmentFault
from system.odd_files import dangling, fifo, link, second_name


def fail(number: int):
    def call(*_args):
        raise OSError(number, os.strerror(number))

    return call


def test_only_one_holds_a_folder_and_it_leaves_nothing(tmp_path):
    folder = tmp_path / "new"
    with folder_lock.locked(folder):
        with raises_fault("SF-FOLDER-BUSY", folder, os.getpid()), folder_lock.locked(folder):
            pass
        assert os.listdir(folder) == [".lock"]
    assert os.listdir(folder) == []
    with folder_lock.locked(folder):
        pass


def test_a_lock_file_that_its_holder_removed_keeps_nobody_out(tmp_path, monkeypatch):
    """Between opening and locking the file another process ends: the lock must be taken on the file that is there."""
    flock, first = folder_lock._flock, []

    def removed_first(handle, path):
        if not first:
            first.append(handle)
            path.unlink()
        flock(handle, path)

    monkeypatch.setattr(folder_lock, "_flock", removed_first)
    with folder_lock.locked(tmp_path), pytest.raises(EnvironmentFault), folder_lock.locked(tmp_path):
        pass


def notes(path, other):
    path.write_text("process notes")


def like_a_lock_and_more(path, other):
    path.write_text("process 7 on paper\n" + "notes\n" * 40)


@pytest.mark.parametrize("make", [notes, like_a_lock_and_more, second_name, link, dangling, fifo])
def test_what_has_the_name_of_the_lock_and_is_none_stays_as_it_is(tmp_path, make):
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder / ".lock", other)
    before = (folder / ".lock").read_bytes() if (folder / ".lock").is_file() else None
    with raises_fault("SF-FILE-WRITE", folder, ".lock"), folder_lock.locked(folder):
        pass
    assert other.read_text() == "years of work"
    assert os.listdir(folder) == [".lock"]
    assert before is None or (folder / ".lock").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["run", "thesis.txt"]


def test_twin_without_the_look_at_links_another_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_NO_LINK", 0)
    monkeypatch.setattr(folder_lock, "_require_lock_file", lambda handle, path: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_what_has_the_name_of_the_lock_and_is_none_stays_as_it_is(tmp_path, link)
    assert (tmp_path / "thesis.txt").read_text().startswith("process ")


@pytest.mark.parametrize("make", [notes, like_a_lock_and_more])
def test_twin_without_the_look_at_the_content_it_is_lost(tmp_path, monkeypatch, make):
    monkeypatch.setattr(folder_lock, "_require_lock_file", lambda handle, path: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_what_has_the_name_of_the_lock_and_is_none_stays_as_it_is(tmp_path, make)
    assert not (tmp_path / "run" / ".lock").exists()


@pytest.mark.parametrize("left", [b"", bytes(30), b"process 7 on a.machine-that is gone"])
def test_what_a_killed_process_left_is_no_obstacle(tmp_path, left):
    (tmp_path / ".lock").write_bytes(left)
    with folder_lock.locked(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert os.listdir(tmp_path) == []


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock.fcntl, "flock", fail(errno.ENOSYS))
    with folder_lock.locked(tmp_path):
        pass
    monkeypatch.setattr(folder_lock.fcntl, "flock", fail(errno.EIO))
    with pytest.raises(EnvironmentFault), folder_lock.locked(tmp_path):
        pass
