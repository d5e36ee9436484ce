"""Which folders are runs, and what a glance says of each."""

import json
import subprocess
import sys

import pytest

from helpers.faults import gives
from helpers.run_folders import log_more, log_rows, train_row, write_run
from surefoot.commands.board import listing
from surefoot.commands.board.listing import Overview, last_records, list_runs
from surefoot.report import views
from surefoot.report.record import read_run
from surefoot.report.views import figures
from surefoot.system import durable, folder_lock


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


def test_an_ended_run_has_the_figures_of_its_report(root):
    """An ended run has the figures of its report, not those of its last step; but for the training loss, which is the
    newest as in a run at work."""
    folder, results = root / "ended", {"train_loss": 0.25, "train_tokens_per_second": 812.4, "eval_loss": 0.4375}
    (folder / "all_results.json").write_text(json.dumps({**results, "eval_step": 10, "eval_accuracy": 0.5}))
    found = seen(root)["ended"]
    assert (found.evaluation, found.speed) == ("0.4375", "812")
    record = read_run(folder)
    shown = {one.name: one.value for one in figures(record.rows, "finished", record.results)}
    named = ("evaluation loss", "tokens per second")
    assert (found.evaluation, found.speed) == tuple(shown[name] for name in named)
    assert found.loss == {one.name: one.value for one in figures(record.rows, "running", {})}["training loss"]
    assert found.loss != shown["training loss"]


def test_a_run_that_learns_from_rewards_shows_them(root, monkeypatch):
    """Its loss is near 0, and that of its evaluation minus the reward."""
    rows = [row | {"reward": row["current_steps"] / 8} for row in log_rows(4)]
    for row in rows:
        if "eval_loss" in row:
            row |= {"eval_reward": 0.75, "eval_loss": -0.75}
        row["response_tokens"] = row.pop("supervised_tokens", 9)
    rows.append({**train_row(5, 5, 1e-9), "reward": 0.625, "response_tokens": 9})
    rows.append({"current_steps": 5, "eval_loss": -0.75, "eval_reward": 0.75, "eval_response_tokens": 9})
    write_run(root / "grpo", rows)
    found = seen(root)["grpo"]
    assert gives(found.loss, "0.625")
    assert found.evaluation == "0.75"
    monkeypatch.setattr(views, "evaluates_rewards", lambda rows: False)  # twin
    assert not gives(seen(root)["grpo"].loss, "0.625")


def test_twin_those_of_the_last_step_are_others(root, monkeypatch):
    monkeypatch.setattr(listing, "results_of", lambda folder: {})
    with pytest.raises(AssertionError):
        test_an_ended_run_has_the_figures_of_its_report(root)


def test_figures_that_cannot_be_read_are_left_out(root):
    (root / "ended" / "all_results.json").write_text('{"eval_step": 3}')
    assert seen(root)["ended"].status == "finished"


def test_new_figures_are_noticed(root):
    overview = Overview(root)
    before = {glance.name: glance.evaluation for glance in overview.glances()}
    (root / "ended" / "all_results.json").write_text('{"eval_loss": 0.125, "eval_step": 3}')
    assert {glance.name: glance.evaluation for glance in overview.glances()} == {**before, "ended": "0.125"}


def test_a_run_at_work_is_running_until_its_process_ends(root):
    code = (
        "import sys; from surefoot.system.folder_lock import locked\n"
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


def test_runs_are_found_in_folders_of_the_folder(root):
    """As below a project; of the same name too, but no deeper than a project has them, and none within a run."""
    write_run(root / "sweep" / "ended", log_rows(5))
    write_run(root / "ended" / "inner", log_rows(3))
    write_run(root / "a" / "b" / "c", log_rows(3))
    assert set(seen(root.parent)) == {f"{root.name}/{name}" for name in ("ended", "broken", "killed", "sweep/ended")}
    runs = list_runs(root.parent)
    assert len({run.id for run in runs}) == len(runs)
    assert set(seen(root)) == {"ended", "broken", "killed", "sweep/ended", "a/b/c"}


def test_links_and_other_things_are_no_logs(tmp_path):
    (tmp_path / "log").write_text('{"step": 1}\n')
    (tmp_path / "link").symlink_to(tmp_path / "log")
    for path in (tmp_path / "link", tmp_path):
        assert last_records(path) == []
    assert last_records(tmp_path / "log") == [{"step": 1}]


def test_a_glance_reads_the_end(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(5000)))
    seen = last_records(path, most=100)
    assert [record["step"] for record in seen] == [4994, 4995, 4996, 4997, 4998, 4999]
    assert last_records(path, most=10**6)[0] == {"step": 0}
    assert json.dumps(last_records(tmp_path / "absent")) == "[]"
