"""Writes are whole or absent, flushed in the right order, and name the path when the disk fails."""

import errno
import hashlib
import io
import json
import os
import stat
from contextlib import contextmanager
from pathlib import Path

import pytest

from helpers.no_fsync import TRUE_FSYNC
from surefoot.system import disk, durable
from surefoot.system.errors import EnvironmentFault
from system.odd_files import dangling, fifo, link


def files_under(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def fail(number: int):
    def call(*_args, **_kwargs):
        raise OSError(number, os.strerror(number))

    return call


@contextmanager
def refused(number: int, path: Path):
    """The disk refuses with this error; the fault names the path, and a way out where there is one."""
    with pytest.raises(EnvironmentFault) as caught:
        yield
    (fault,) = caught.value.faults
    code = "SF-DISK-FULL" if number == errno.ENOSPC else "SF-FILE-WRITE"
    assert (fault.code, fault.where, caught.value.__cause__.errno) == (code, str(path), number)
    assert bool(fault.fix) == (number not in (errno.ENOTDIR, errno.EIO))


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, str]]:
    """The order of flushes and renames, by file name."""
    seen: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real_open, real_fsync, real_replace, real_rename = os.open, TRUE_FSYNC, os.replace, os.rename

    def open_(path, *args, **kwargs):
        handle = real_open(path, *args, **kwargs)
        names[handle] = Path(path).name
        return handle

    def fsync(handle):
        seen.append(("fsync", names.pop(handle, "new file")))
        real_fsync(handle)

    def replace(source, target):
        seen.append(("rename", Path(target).name))
        real_replace(source, target)

    def rename(source, target):
        seen.append(("rename", Path(target).name))
        real_rename(source, target)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "rename", rename)
    return seen


def test_write_replaces_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "a.txt"
    durable.write_text(path, "old")
    durable.write_bytes(path, b"new\r\n")
    assert path.read_bytes() == b"new\r\n"
    assert files_under(tmp_path) == ["a.txt"]


def test_json_is_readable_and_strict(tmp_path):
    durable.write_json(tmp_path / "a.json", {"b": "ä", "a": 1})
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "b": "ä",\n  "a": 1\n}\n'
    with pytest.raises(ValueError, match="JSON"):
        durable.write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["a"] == 1


def test_a_file_is_flushed_before_it_is_named_and_its_folder_after(tmp_path, calls):
    durable.write_bytes(tmp_path / "a", b"1")
    assert calls == [("fsync", "new file"), ("rename", "a"), ("fsync", tmp_path.name)]


def test_mode_obeys_umask(tmp_path):
    previous = os.umask(0o027)
    try:
        durable.write_bytes(tmp_path / "a", b"1")
        with durable.staged_folder(tmp_path / "folder") as staging:
            (staging / "private").touch(mode=0o600)
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder" / "private").stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o750


@pytest.mark.parametrize("call", ["fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
def test_a_failing_disk_leaves_the_old_content_and_no_temporary_file(tmp_path, monkeypatch, call, number):
    path = tmp_path / "state.json"
    durable.write_text(path, "old")
    monkeypatch.setattr(os, call, fail(number))
    with refused(number, path):
        durable.write_text(path, "new")
    assert path.read_text() == "old"
    assert files_under(tmp_path) == ["state.json"]


def test_a_folder_that_is_a_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    with refused(errno.ENOTDIR, tmp_path / "file" / "a"):
        durable.write_text(tmp_path / "file" / "a", "x")


def test_append_line_is_all_or_nothing(tmp_path, monkeypatch):
    path = tmp_path / "log"
    durable.append_lines(path, "one")

    class Full(io.FileIO):
        """Takes two bytes at a time and is full after four."""

        room = 4

        def write(self, data):
            if Full.room <= 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            Full.room -= 2
            return super().write(bytes(data[:2]))

    def open_(path, mode, buffering=-1, opener=None):
        return Full(path, mode, opener=opener)

    monkeypatch.setattr("builtins.open", open_)
    with refused(errno.ENOSPC, path):
        durable.append_lines(path, "two and more")
    Full.room = 100
    durable.append_lines(path, "in short writes")
    monkeypatch.undo()
    assert path.read_text().splitlines() == ["one", "in short writes"]
    with pytest.raises(ValueError, match="line end"):
        durable.append_lines(path, "a\nb")


def test_staged_folder_appears_whole(tmp_path, calls):
    final = tmp_path / "run" / "checkpoint-1"
    with durable.staged_folder(final) as staging:
        (staging / "sub").mkdir()
        (staging / "sub" / "a").write_text("1")
        (staging / "b").write_text("2")
        assert staging.parent == final.parent
        assert staging.name.startswith(".checkpoint-1.")
        assert not final.exists()
    assert files_under(tmp_path / "run") == ["checkpoint-1", "checkpoint-1/b", "checkpoint-1/sub", "checkpoint-1/sub/a"]
    assert calls.pop(0) == ("fsync", tmp_path.name)  # the name of the folder that was made for it
    assert [name for _, name in calls[:3]] == ["a", "sub", "b"]
    assert calls[3][0] == "fsync"
    assert calls[3][1].startswith(".checkpoint-1.")
    assert calls[4:] == [("rename", "checkpoint-1"), ("fsync", "run")]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_staged_folder_vanishes_when_the_block_raises(tmp_path, error):
    def write_half():
        with durable.staged_folder(tmp_path / "a") as staging:
            (staging / "half").write_text("x")
            raise error

    with pytest.raises(error):
        write_half()
    assert files_under(tmp_path) == []


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_staged_folder_on_a_failing_disk(tmp_path, monkeypatch, call):
    monkeypatch.setattr(os, call, fail(errno.ENOSPC))
    with refused(errno.ENOSPC, tmp_path / "a"), durable.staged_folder(tmp_path / "a") as staging:
        (staging / "half").write_text("x")
    assert files_under(tmp_path) == []


def test_staged_folder_never_replaces(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "precious").write_text("x")
    with refused(errno.ENOTEMPTY, tmp_path / "a"), durable.staged_folder(tmp_path / "a"):
        pass
    assert files_under(tmp_path) == ["a", "a/precious"]


def test_a_folder_is_replaced_although_a_kill_left_what_an_earlier_one_replaced(tmp_path):
    for name, content in ((".replaced-a", "first"), ("a", "second")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "b").write_text(content)
    with durable.staged_folder(tmp_path / "a", replace=True) as staging:
        (staging / "b").write_text("third")
    assert files_under(tmp_path) == ["a", "a/b"]
    assert (tmp_path / "a" / "b").read_text() == "third"


def test_folders_are_made_from_above_and_each_name_is_flushed(tmp_path, calls):
    durable.make_folders(tmp_path / "new" / "deep" / "o")
    assert calls == [("fsync", tmp_path.name), ("fsync", "new"), ("fsync", "deep")]
    calls.clear()
    durable.make_folders(tmp_path / "new" / "deep")
    assert calls == []
    (tmp_path / "file").touch()
    with refused(errno.EEXIST, tmp_path / "file"):
        durable.make_folders(tmp_path / "file")
    with refused(errno.ENOTDIR, tmp_path / "file" / "a" / "b"):
        durable.make_folders(tmp_path / "file" / "a" / "b")


def test_a_folder_that_cannot_be_read_takes_a_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail(errno.EACCES))
    durable.make_folders(tmp_path / "a" / "b")
    monkeypatch.setattr(os, "fsync", fail(errno.EIO))
    with refused(errno.EIO, tmp_path / "c"):
        durable.make_folders(tmp_path / "c")


ODD = (link, dangling, fifo)


@pytest.mark.parametrize("make", ODD)
def test_a_log_that_is_no_file_of_its_own_takes_no_line(tmp_path, make):
    other = tmp_path / "thesis.txt"
    other.write_text("years of work")
    run = tmp_path / "run"
    run.mkdir()
    make(run / "run.log", other)
    with refused(errno.ELOOP, run / "run.log"):
        durable.append_lines(run / "run.log", "one")
    assert other.read_text() == "years of work"
    assert files_under(tmp_path) == ["run", "run/run.log", "thesis.txt"]


def test_sha256_file(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_CHUNK", 7)
    data = bytes(range(256)) * 3
    (tmp_path / "a").write_bytes(data)
    assert durable.sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()


def test_only_what_killed_writes_left_is_cleared(tmp_path):
    mine = durable._hidden_beside(tmp_path / "state.json")
    mine.touch()
    (durable._hidden_beside(tmp_path / "checkpoint-3") / "sub").mkdir(parents=True)
    (tmp_path / ".replaced-checkpoint-3").mkdir()  # may be the only copy
    (tmp_path / ".notes.tmp").touch()
    durable.clear_temporary(tmp_path)
    assert files_under(tmp_path) == [".notes.tmp", ".replaced-checkpoint-3"]


@pytest.mark.parametrize("failures", [1, 2], ids=["once", "twin: it never removes"])
def test_require_writable_leaves_nothing_on_a_disk_that_fails_once(tmp_path, monkeypatch, failures):
    real, left = durable.disk.remove_folder, [OSError(errno.EIO, "input/output error")] * failures

    def failing(path):
        if left:
            raise left.pop()
        real(path)

    monkeypatch.setattr(durable.disk, "remove_folder", failing)
    with pytest.raises(EnvironmentFault):
        durable.require_writable(tmp_path / "run")
    assert (list(tmp_path.iterdir()) == []) is (failures == 1)


def test_require_writable_leaves_nothing(tmp_path):
    durable.require_writable(tmp_path / "a" / "b")
    assert files_under(tmp_path) == []
    (tmp_path / "file").touch()
    with refused(errno.ENOTDIR, tmp_path / "file" / "a"):
        durable.require_writable(tmp_path / "file" / "a")


def test_what_stands_for_a_flush_in_tests_refuses_what_is_not_open(tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fsync(handle)


# --- the checks above have teeth -------------------------------------------------------------------------------------


def test_twin_without_the_flush_is_seen(tmp_path, calls, monkeypatch):
    monkeypatch.setattr(disk, "sync", lambda path: None)
    durable.write_bytes(tmp_path / "a", b"1")
    assert calls != [("fsync", "new file"), ("rename", "a"), ("fsync", tmp_path.name)]


def test_twin_without_the_look_at_links_another_file_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_NO_LINK", 0)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_log_that_is_no_file_of_its_own_takes_no_line(tmp_path, link)
    assert (tmp_path / "thesis.txt").read_text() != "years of work"


def test_twin_without_clean_up_leaves_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", fail(errno.ENOSPC))
    monkeypatch.setattr(Path, "unlink", lambda self: None)
    with pytest.raises(EnvironmentFault):
        durable.write_text(tmp_path / "a", "x")
    assert files_under(tmp_path) != []


@pytest.mark.parametrize("name", [".a.1-0123abcd.tmp", ".replaced-there"])
def test_of_a_link_left_by_anyone_the_link_goes_and_nothing_behind_it(tmp_path, name):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_text("x")
    folder = tmp_path / "run"
    (folder / "there").mkdir(parents=True)
    (folder / name).symlink_to(tmp_path / "elsewhere")
    durable.clear_temporary(folder)
    durable.restore_replaced(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["there"]
    assert (tmp_path / "elsewhere" / "kept").read_text() == "x"


def test_twin_a_link_taken_for_a_folder_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(durable, "_is_folder", Path.is_dir)
    (tmp_path / ".a.1-0123abcd.tmp").symlink_to(tmp_path)
    with pytest.raises(EnvironmentFault):
        durable.clear_temporary(tmp_path)


def test_what_others_began_long_ago_goes_and_what_they_write_now_stays(tmp_path):
    old, busy, named = (tmp_path / name for name in (".a.12-0123abcd.tmp", ".b.12-0123abcd.tmp", "c"))
    for folder in (old, busy, named):
        folder.mkdir()
        (folder / "ids.npy").write_bytes(b"x")
        for path in (folder / "ids.npy", folder):
            os.utime(path, (0, 0))
    (busy / "ids.npy").write_bytes(b"xy")  # the folder itself is as old
    os.utime(busy, (0, 0))
    durable.clear_abandoned(tmp_path)
    assert sorted(tmp_path.iterdir()) == [busy, named]
