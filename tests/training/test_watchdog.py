"""Who is told to have ended, stopped or stalled, by which rank, and once."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import replace

import pytest
from torch.distributed import HashStore, TCPStore

from helpers.faults import gives
from surefoot.system import durable
from surefoot.training import watchdog
from surefoot.training.activity import LEAST_LIMIT, SLOWER, Activity, Heartbeat, is_gone
from surefoot.training.watchdog import RankFault, Watchdog, publish_fault, published_fault, slowest

GONE = 2**22 + 1  # above the largest process id of Linux
# A thread that "ends the process" ends itself in these tests.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
LONG = 30.0  # seconds: far more than any of this takes


def heartbeat(**changes) -> Heartbeat:
    return replace(Activity().heartbeat(), **changes)


def test_a_beat_arrives_as_it_was_sent():
    one = heartbeat(step=7, doing="training")
    assert Heartbeat.from_bytes(one.to_bytes()) == one


def test_a_process_that_ended_is_known_by_its_id_and_its_birth():
    own = heartbeat()
    assert not is_gone(own, own.host)
    assert is_gone(replace(own, pid=GONE), own.host)
    assert is_gone(replace(own, born=own.born + 1), own.host), "another process has its number now"
    assert not is_gone(replace(own, pid=GONE), "another machine"), "which cannot be seen from here"


def test_the_rank_that_is_behind_is_named():
    ahead, behind = heartbeat(step=3, ticks=4), heartbeat(step=3, ticks=2)
    assert slowest([ahead, behind]) == [1]
    assert slowest([ahead, heartbeat(step=2, ticks=9)]) == [1]
    assert slowest([ahead, ahead]) == []


def test_of_ranks_that_came_equally_far_the_one_outside_a_collective_is_named():
    waits, works = heartbeat(step=3, waiting=True), heartbeat(step=3, waiting=False)
    assert slowest([waits, works, waits]) == [1]
    assert slowest([waits, waits]) == []


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_only_steps_after_the_first_are_bounded(monkeypatch):
    clock = Clock(monkeypatch)
    activity = Activity()
    activity.step_begins(1)
    clock.now += 10 * LEAST_LIMIT
    assert activity.stalled is None, "the first step loads and compiles"
    activity.step_begins(2)
    clock.now += LEAST_LIMIT - 1
    assert activity.stalled is None
    slow = 10 * LEAST_LIMIT
    assert activity.limit == SLOWER * slow
    clock.now += SLOWER * slow
    assert activity.stalled == pytest.approx(LEAST_LIMIT - 1 + SLOWER * slow)


def test_what_is_declared_may_take_its_time_and_counts_as_no_step(monkeypatch):
    clock = Clock(monkeypatch)
    activity = Activity()
    for step in (1, 2, 3):
        activity.step_begins(step)
        clock.now += 1
    with activity.during("saving"):
        assert activity.doing == "saving"
        clock.now += 100 * LEAST_LIMIT
        assert activity.stalled is None
    assert activity.doing == "training"
    assert activity.limit == LEAST_LIMIT
    clock.now += LEAST_LIMIT + 1
    assert activity.stalled is not None, "twin: outside of it, it is a stall"


def test_the_first_word_counts():
    store = HashStore()
    assert published_fault(store) is None
    first, second = RankFault(1, 3, ("rank 0 is gone",)), RankFault(0, 2, ("bad",))
    assert publish_fault(store, first) == first
    assert publish_fault(store, second) == first
    assert published_fault(store) == first


@pytest.fixture
def server():
    return TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)


def watch(store, monkeypatch, activity=None, **changes):
    """The watchdog of rank 0, and what it ended with."""
    monkeypatch.setattr(watchdog, "PERIOD", 0.05)
    monkeypatch.setattr(watchdog, "LINGER", 0.2)
    ended, codes = threading.Event(), []

    def end(code):
        codes.append(code)
        ended.set()
        raise SystemExit  # ends the thread, as the process would

    dog = Watchdog(store, 0, 2, activity or Activity(), end=end, **changes)
    return dog, ended, codes


@pytest.mark.parametrize(
    ("other", "values"),
    [({"pid": GONE, "step": 5, "doing": "saving"}, ["saving"]), ({}, [1])],  # seconds that it was silent
)
def test_a_rank_that_is_gone_or_silent_ends_the_run(server, monkeypatch, capfd, other, values):
    server.set("heartbeat/1", heartbeat(**other).to_bytes().decode())
    notes = []
    dog, ended, codes = watch(server, monkeypatch, silent=1.0, note=notes.append)
    dog.start()
    assert ended.wait(LONG)
    assert codes[0] == 3
    for said in (capfd.readouterr().err, notes[0]):
        assert re.search(rf"rank 1\b.*\bpid {GONE if other else os.getpid()}\b", said)
        assert all(gives(said, value) for value in values), said
    assert published_fault(server) is not None, "the others can read it"


def test_twin_a_rank_that_beats_or_is_over_ends_nothing(server, monkeypatch):
    server.set("heartbeat/1", heartbeat(pid=GONE, over=True).to_bytes().decode())
    dog, ended, _ = watch(server, monkeypatch, silent=0.5)
    dog.start()
    assert not ended.wait(0.8)
    dog.stop()
    assert Heartbeat.from_bytes(server.get("heartbeat/0")).pid == os.getpid()


def test_a_fault_of_another_rank_ends_this_one_with_its_code_and_without_a_word(server, monkeypatch, capfd):
    server.set("heartbeat/1", heartbeat().to_bytes().decode())
    publish_fault(server, RankFault(1, 5, ("diverged",)))
    dog, ended, codes = watch(server, monkeypatch)
    dog.start()
    assert ended.wait(LONG)
    assert codes[0] == 5
    assert "error" not in capfd.readouterr().err


@pytest.mark.parametrize(("met", "said"), [(True, "rank 0 (pid 4194305) is gone"), (False, "error: rank 0 is gone")])
def test_a_rank_that_goes_with_the_store_is_known_by_name_from_the_meeting_on(server, monkeypatch, capfd, met, said):
    """However soon: without the meeting (twin), nobody knows who it was."""
    server.set("heartbeat/0", heartbeat(pid=GONE).to_bytes().decode())
    monkeypatch.setattr(watchdog, "PERIOD", 0.0)
    codes = []
    dog = Watchdog(server, 1, 2, Activity(), end=codes.append)
    if met:
        dog.meet()
    dog._without_store()
    assert codes == [3]
    assert said in capfd.readouterr().err


def test_a_stall_names_who_is_behind(server, monkeypatch, capfd):
    monkeypatch.setattr("surefoot.training.activity.LEAST_LIMIT", 0.3)
    server.set("heartbeat/1", heartbeat(step=2, ticks=0, doing="training").to_bytes().decode())
    activity = Activity()
    activity.step_begins(1)
    activity.step_begins(2)
    activity.tick()
    dog, ended, codes = watch(server, monkeypatch, activity)
    dog.start()
    assert ended.wait(LONG)
    assert codes[0] == 3
    assert "rank 1" in (said := capfd.readouterr().err)
    assert "at step 2" in said


def test_a_process_without_its_launcher_ends(server, monkeypatch):
    dog, ended, codes = watch(server, monkeypatch, launcher=GONE)
    dog.start()
    assert ended.wait(LONG)
    assert codes[0] == 3


def test_a_rank_that_never_comes_is_named(server, monkeypatch, capfd):
    dog, ended, codes = watch(server, monkeypatch, meeting=1.0)
    dog.start()
    assert ended.wait(LONG)
    assert codes[0] == 3
    assert re.search(r"error: rank 1 of 2 .*\b1 s\b", capfd.readouterr().err)


def test_twin_a_rank_that_comes_in_time_ends_nothing(server, monkeypatch):
    dog, ended, _ = watch(server, monkeypatch, meeting=1.0)
    dog.start()
    assert not ended.wait(0.3)
    server.set("heartbeat/1", heartbeat().to_bytes().decode())
    assert not ended.wait(0.9)  # 1.2 s in all
    dog.stop()


def _full(line):
    raise OSError("no space left")


def test_a_log_that_cannot_be_written_keeps_no_process_alive(server, monkeypatch, capfd):
    server.set("heartbeat/1", heartbeat(pid=GONE).to_bytes().decode())
    dog, ended, codes = watch(server, monkeypatch, note=_full)
    dog.start()
    assert ended.wait(LONG)
    assert codes[0] == 3
    assert re.search(rf"rank 1\b.*\bpid {GONE}\b", capfd.readouterr().err)


def test_what_is_half_written_is_removed_before_the_process_is_ended(server, monkeypatch, tmp_path):
    left = []
    server.set("heartbeat/1", heartbeat(pid=GONE).to_bytes().decode())
    dog, ended, _ = watch(server, monkeypatch, note=lambda line: left.extend(tmp_path.iterdir()))
    with durable.staged_folder(tmp_path / "checkpoint-4") as staging:
        (staging / "part").write_text("of it")
        dog.start()
        assert ended.wait(LONG)
        assert [path.name for path in left] == [staging.name], "it was there until then"
        assert list(tmp_path.iterdir()) == []
        staging.mkdir()  # for the block, which goes on in this test alone
