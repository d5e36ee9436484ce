"""One process works in a folder at a time, and a lock outlives nobody."""

from __future__ import annotations

import errno
import os
import re

import pytest

from surefoot import folder_lock
from surefoot.errors import EnvironmentFault


def fail(number: int):
    def call(*_args):
        raise OSError(number, os.strerror(number))

    return call


def test_only_one_holds_a_folder_and_it_leaves_nothing(tmp_path):
    folder = tmp_path / "new"
    with folder_lock.locked(folder):
        holder = f"{folder}: is in use by process {os.getpid()} on "
        with pytest.raises(EnvironmentFault, match=re.escape(holder)), folder_lock.locked(folder):
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


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock.fcntl, "flock", fail(errno.ENOSYS))
    with folder_lock.locked(tmp_path):
        pass
    monkeypatch.setattr(folder_lock.fcntl, "flock", fail(errno.EIO))
    with pytest.raises(EnvironmentFault), folder_lock.locked(tmp_path):
        pass
