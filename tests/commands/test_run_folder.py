"""Run folders as two users, a killed process or a careless command leave them."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from safetensors.torch import load_file, save_file

from helpers import zoo
from helpers.faults import gives, lines_giving, prints_fault
from helpers.trained_runs import heron_config, heron_folder
from surefoot.report.verification import verify_folder
from surefoot.runs.run_folder import written_by_run
from surefoot.system import durable
from surefoot.system.durable import LOCK
from surefoot.system.folders import MANIFEST


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return heron_folder(tmp_path_factory.mktemp("models")) / "base"


@pytest.fixture
def output(tmp_path):
    return tmp_path / "out"


def write_config(folder, base):
    shutil.copy(base.parent / "train.json", folder)
    changes = {"batch": {"size": 4}, "duration": "2 steps", "checkpoint": {"every": "1 step"}}
    return heron_config(folder, "out", model=str(base), **changes)


@pytest.fixture
def train(server, base, tmp_path):
    """Run `surefoot train` with the arguments given; exit code and what it said."""
    path = write_config(tmp_path, base)

    def train(*arguments, kill=None):
        log = tmp_path / "log.txt"
        log.write_text("")
        code = server.run(["train", str(path), *arguments], log, kill)
        assert "Traceback" not in log.read_text()
        return code, log.read_text()

    return train


@pytest.fixture(scope="module")
def finished_once(server, base, tmp_path_factory):
    """A run of two steps, which tests get a copy of."""
    folder = tmp_path_factory.mktemp("finished")
    path = write_config(folder, base)
    assert server.run(["train", str(path)], folder / "log.txt") == 0, (folder / "log.txt").read_text()
    return folder / "out"


@pytest.fixture
def finished(train, finished_once, output):
    """`train` whose run has ended."""
    shutil.copytree(finished_once, output)
    return train


def test_a_folder_in_use_is_refused_until_its_process_ends(train, output):
    code = (
        "import sys; from surefoot.system.folder_lock import locked\n"
        "with locked(sys.argv[1]): print('held', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(output)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    found, log = train()
    holder.kill()
    holder.communicate()
    assert found == 3
    assert prints_fault(log, "SF-FOLDER-BUSY", output, holder.pid, socket.gethostname())
    assert (output / durable.LOCK).is_file()  # killed: the file stays, the lock does not
    assert train()[0] == 0


def test_a_folder_whose_lock_is_a_link_is_refused(train, output, tmp_path):
    (tmp_path / "thesis.txt").write_text("years")
    output.mkdir()
    (output / durable.LOCK).symlink_to(tmp_path / "thesis.txt")
    code, log = train()
    assert code == 3
    assert prints_fault(log, "SF-FILE-WRITE", output, ".lock")
    assert (tmp_path / "thesis.txt").read_text() == "years"
    assert [path.name for path in output.iterdir()] == [durable.LOCK]


def test_a_run_that_is_extended_and_stops_is_not_called_corrupt(finished, output):
    train = finished
    assert train("--resume", "duration=4 steps", kill={"at": "step", "n": 4})[0] == -9
    assert not [fault for check in verify_folder(output) for fault in check.faults]
    assert train("--resume", "duration=4 steps")[0] == 0
    assert not [fault for check in verify_folder(output) for fault in check.faults]
    assert not [path for path in output.iterdir() if path.name.startswith(".")]


def test_logs_that_were_cut_after_a_kill_are_told_and_mended_when_the_run_goes_on(train, output):
    assert train("duration=4 steps", "log_every=1", kill={"at": "step", "n": 4})[0] == -9
    for name in ("trainer_log.jsonl", "flight.jsonl"):
        lines = (output / name).read_text().splitlines(keepends=True)
        (output / name).write_text(lines[0])
    faults = [fault.where for check in verify_folder(output) for fault in check.faults]
    assert faults == [str(output / "trainer_log.jsonl"), str(output / "flight.jsonl")]
    code, log = train("--resume", "duration=4 steps", "log_every=1")
    assert code == 0
    assert [line for line in log.splitlines() if line.startswith(f"{output / 'trainer_log.jsonl'}: ")]
    rows = [json.loads(line) for line in (output / "trainer_log.jsonl").read_text().splitlines()]
    assert [row["current_steps"] for row in rows] == [1, 2, 3, 4]
    assert not [fault for check in verify_folder(output) for fault in check.faults]


def test_a_run_that_goes_on_with_another_model_is_told_so_and_not_of_its_tokenizer(finished, base, tmp_path):
    train = finished
    other = tmp_path / "other"
    zoo.llama3(other, chat_template=False, version="3.0")
    code, log = train("--resume", "duration=3 steps", f"model={other}")
    assert code == 4
    assert [line for line in log.splitlines() if line.startswith(f"error: {other}: ")]
    assert "tokenizer.pad" not in log
    shutil.copytree(base, tmp_path / "moved")  # twin: the same one elsewhere
    assert train("--resume", "duration=3 steps", f"model={tmp_path / 'moved'}")[0] == 0


def test_a_kill_between_the_two_renames_of_a_save_is_mended_by_resume(train, output):
    assert train(kill={"at": "step", "n": 2})[0] == -9
    os.rename(output / "checkpoint-1", output / ".replaced-checkpoint-1")
    code, log = train("--resume")
    assert code == 0
    assert lines_giving(log, output / "checkpoint-1")


def test_overwrite_through_a_link_replaces_what_it_points_to(train, output, tmp_path):
    (tmp_path / "disk").mkdir()
    output.symlink_to(tmp_path / "disk")
    assert train()[0] == 0
    assert train("--overwrite", "duration=1 step")[0] == 0
    assert output.is_symlink()
    assert [path.name for path in (tmp_path / "disk").glob("checkpoint-*")] == ["checkpoint-1"]


def test_an_impossible_output_is_found_before_the_plan(train, tmp_path):
    for place in (tmp_path / "train.json" / "x", "/proc/nope"):
        code, log = train(f"output={place}")
        assert code == 3
        assert prints_fault(log, "SF-FILE-WRITE", place)


OWN = (
    "notes.md",
    "slurm-7.out",
    "exports",
    "checkpoint-2.bak",
    "my-model.safetensors",
    "model-notes.json",
    "training_ideas.png",
)  # of a user


def test_overwrite_removes_what_the_run_wrote_and_nothing_else(train, output):
    assert train("data.eval=2", "report_to=[tensorboard]")[0] == 0
    written = {path.name for path in output.iterdir()}
    for name in OWN:
        (output / name).write_text("mine")
    ours = written_by_run(output)
    assert {path.name for path in output.iterdir() if ours(path.name)} == written - {LOCK}
    shutil.rmtree(output / "checkpoint-2")
    (output / MANIFEST).unlink()  # as after a kill: no list of what was published
    assert train("--overwrite", "duration=1 step")[0] == 0
    assert {name: (output / name).read_text() for name in OWN} == dict.fromkeys(OWN, "mine")
    left = {path.name for path in output.iterdir()} - set(OWN)
    assert left < written - {"checkpoint-2", "eval_results.json", "training_eval_loss.png", "tensorboard"}


def check_all_conflicts(train, *arguments):
    """An occupied folder hides nothing else that is wrong."""
    code, log = train(*arguments, "metrics.names=[bleu]", "adapter.targets=[q_prj]", "data.eval=2")
    assert code == 2, log
    assert [name for name in ("[SF-USE-OUTPUT]", "bleu", "q_prj") if name not in log] == []


def test_all_conflicts_are_told_with_an_occupied_folder(finished):
    check_all_conflicts(finished)
    check_all_conflicts(finished, "--dry-run")


def test_twin_in_an_empty_folder_they_are_told_without_it(train):
    with pytest.raises(AssertionError, match="SF-USE-OUTPUT"):
        check_all_conflicts(train)


def test_another_model_or_other_data_are_told_of_a_finished_run_too(finished, output, base, tmp_path):
    """Their paths are free to change, so only their content tells. The twins were moved alone."""
    for name in ("moved", "other"):
        shutil.copytree(base, tmp_path / name)
        shutil.copy(tmp_path / "train.json", tmp_path / f"{name}.json")
    records = json.loads((tmp_path / "other.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps([{**records[0], "output": "else"}, *records[1:]]))
    weights = tmp_path / "other" / "model.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.*") if path.name != LOCK}
    for name, code in (("moved", 0), ("other", 4)):
        for change in (f"model={tmp_path / name}", f"data.train={tmp_path / name}.json"):
            found, log = finished("--resume", change)
            assert (found, "[SF-RESUME-CHANGED]" in log) == (code, code == 4), log
            assert gives(log, change.partition("=")[2])
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_duration_below_the_step_reached_is_refused(finished, output):
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    code, log = finished("--resume", "duration=1 step")
    assert code == 2, log
    assert "duration" in log
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*") if path.name != LOCK} == before


def test_twin_the_same_length_in_other_words_has_nothing_to_do_and_a_longer_one_goes_on(finished, output):
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*.*") if path.name != LOCK}
    code, log = finished("--resume", "duration=1 epoch")  # 8 records, 4 in a step
    assert code == 0, log
    assert {path: path.stat().st_mtime_ns for path in before} == before
    code, log = finished("--resume", "duration=3 steps")
    assert code == 0, log
    assert (output / "checkpoint-3").is_dir()
