"""Which folders are runs, and what a glance says of each."""

from __future__ import annotations

import subprocess
import sys

import pytest

from runfolders import log_more, log_rows, train_row, write_run
from surefoot import durable, folder_lock
from surefoot.board import listing
from surefoot.board.listing import Overview, list_runs


@pytest.fixture
def root(tmp_path):
    write_run(tmp_path / "runs" / "ended", log_rows(20), finished=True)
    write_run(tmp_path / "runs" / "broken", log_rows(9, 30, bad=(9,)), diverged="it did")
    write_run(tmp_path / "runs" / "killed", log_rows(4, 30))
    return tmp_path / "runs"


def seen(root):
    return {glance.name: glance for glance in Overview(root).glances()}


def test_status_step_and_numbers(root):
    found = seen(root)
    assert {name: glance.status for name, glance in found.items()} == {
        "ended": "finished",
        "broken": "diverged",
        "killed": "stopped",
    }
    assert (found["killed"].done, found["killed"].total) == (4, 30)
    assert found["ended"].evaluation == "0.5"
    assert found["broken"].loss == "not finite"
    assert found["killed"].speed == "1,004"


def test_a_run_at_work_is_running_until_its_process_ends(root):
    code = (
        "import sys; from surefoot.folder_lock import locked\n"
        "with locked(sys.argv[1]): print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(root / "killed")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    overview = Overview(root)
    first = overview.glances()[0]
    assert (first.name, first.status, first.left) == ("killed", "running", "0:00:21")
    holder.kill()
    holder.communicate()
    assert (root / "killed" / durable.LOCK).is_file()
    assert {glance.name: glance.status for glance in overview.glances()}["killed"] == "stopped"


def test_looking_takes_no_lock(root):
    with folder_lock.locked(root / "killed"):
        assert folder_lock.is_in_use(root / "killed")
    assert not folder_lock.is_in_use(root / "killed")
    Overview(root).glances()
    assert not (root / "killed" / durable.LOCK).exists()


def test_links_hidden_folders_and_others_are_ignored(root, tmp_path):
    write_run(tmp_path / "elsewhere", log_rows(3))
    write_run(root / ".hidden", log_rows(3))
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "notes").mkdir()
    (root / "file").write_text("x")
    (root / "fake").mkdir()
    (root / "fake" / "plan.json").symlink_to(tmp_path / "elsewhere" / "plan.json")
    assert {run.folder.name for run in list_runs(root)} == {"ended", "broken", "killed"}


def test_a_run_itself_can_be_named(root):
    assert [run.folder for run in list_runs(root / "ended")] == [root / "ended"]
    assert list_runs(root / "absent") == []


def test_what_has_not_changed_is_not_read_again(root, monkeypatch):
    overview = Overview(root)
    overview.glances()
    read = []
    monkeypatch.setattr(listing, "last_records", lambda path: read.append(path.parent.name) or [])
    overview.glances()
    assert read == []
    log_more(root / "killed", [train_row(5, 30, 1.0)])
    overview.glances()
    assert set(read) == {"killed"}


def test_a_hundred_runs(tmp_path):
    for k in range(100):
        write_run(tmp_path / f"run-{k:03d}", log_rows(3))
    glances = Overview(tmp_path).glances()
    assert len({glance.id for glance in glances}) == len(glances) == 100
