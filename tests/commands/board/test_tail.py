"""Following a log that another process appends to, cuts and replaces."""

from __future__ import annotations

import json

import pytest

from surefoot.commands.board import tail as module
from surefoot.commands.board.tail import Tail, last_records


def write(path, *steps, mode="a"):
    with path.open(mode) as file:
        file.write("".join(f'{{"step": {step}}}\n' for step in steps))


def steps(tail):
    return [record["step"] for record in tail.records]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, 1, 2, 3)
    return path


def test_what_is_appended_arrives_once(log):
    tail = Tail(log)
    assert not tail.read()
    write(log, 4)
    assert not tail.read()
    assert not tail.read()
    assert steps(tail) == [1, 2, 3, 4]


def test_half_a_line_waits_for_its_rest(log):
    tail = Tail(log)
    with log.open("a") as file:
        file.write('{"step": ')
        file.flush()
        tail.read()
        assert steps(tail) == [1, 2, 3]
        file.write("4}\n")
    tail.read()
    assert steps(tail) == [1, 2, 3, 4]


def replace(log, *kept):
    """As a resume does."""
    other = log.with_name("other")
    write(other, *kept)
    other.replace(log)


@pytest.mark.parametrize("kept", [(1,), (1, 2, 4), (1, 2, 3, 4, 5)])
def test_a_cut_log_is_read_anew(log, kept):
    tail = Tail(log)
    tail.read()
    replace(log, *kept)
    assert tail.read()
    assert steps(tail) == list(kept)


def test_no_file_yet_and_no_file_any_more(tmp_path, log):
    tail = Tail(tmp_path / "absent")
    assert not tail.read()
    write(tmp_path / "absent", 1)
    tail.read()
    assert steps(tail) == [1]
    (tmp_path / "absent").unlink()
    assert tail.read()
    assert steps(tail) == []


def check_a_place_is_told_truly(log):
    tail = Tail(log)
    tail.read()
    place = tail.place
    write(log, 4)
    again = Tail(log)
    assert again.resume(place)
    assert steps(again) == [1, 2, 3]
    again.read()
    assert steps(again) == [1, 2, 3, 4]
    replace(log, 1, 2, 5, 6)  # the same length, other rows
    other = Tail(log)
    assert not other.resume(place)
    assert steps(other) == []


def test_a_place_is_told_truly(log):
    check_a_place_is_told_truly(log)


def test_twin_by_length_alone_it_would_not_be(log, monkeypatch):
    monkeypatch.setattr(module.zlib, "crc32", lambda data, before: 0)
    with pytest.raises(AssertionError):
        check_a_place_is_told_truly(log)


@pytest.mark.parametrize("place", ["", "x", "5", "-1-2", "9999999-1", "12-34; rm", "1" * 400])
def test_nonsense_is_no_place(log, place):
    assert not Tail(log).resume(place)


def test_links_and_other_things_are_no_logs(log, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(log)
    for path in (link, tmp_path):
        tail = Tail(path)
        tail.read()
        assert tail.records == last_records(path) == []


def test_a_glance_reads_the_end(tmp_path):
    path = tmp_path / "log"
    write(path, *range(5000))
    seen = last_records(path, most=100)
    assert [record["step"] for record in seen] == [4994, 4995, 4996, 4997, 4998, 4999]
    assert last_records(path, most=10**6)[0] == {"step": 0}
    assert json.dumps(last_records(tmp_path / "absent")) == "[]"
