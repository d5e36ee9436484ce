"""Trackers get what the log gets, read back from the real libraries; whatever they do, the run goes on."""

import contextlib
import json
import os
import re
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from helpers.faults import gives, raises_fault
from surefoot.report.trackers import adapters, fan_out
from surefoot.report.trackers.adapters import (
    FOLDER,
    Numbers,
    RunFacts,
    Status,
    flat_config,
    make_trackers,
    numbers_of,
    require_trackers,
)
from surefoot.report.trackers.fan_out import MOST_FAILURES, Trackers
from surefoot.system import process
from surefoot.system.libraries import is_installed

ROWS: list[dict[str, Any]] = [
    {"current_steps": 1, "total_steps": 3, "loss": 1.5, "lr": 1e-4, "elapsed_time": "0:00:01"},
    {"current_steps": 2, "total_steps": 3, "loss": None, "lr": 2e-4, "non_finite": "loss"},
    {"current_steps": 3, "total_steps": 3, "loss": 1.25, "lr": 1e-4},
    {"current_steps": 3, "total_steps": 3, "eval_loss": 1.125},
]
NUMBERS = [
    (1, {"train/loss": 1.5, "train/lr": 1e-4}),
    (2, {"train/lr": 2e-4}),
    (3, {"train/loss": 1.25, "train/lr": 1e-4}),
    (3, {"eval/loss": 1.125}),
]
CONFIG = flat_config({"optim": {"lr": 1e-4, "betas": [0.9, 0.95]}, "adapter": None, "stage": "sft"})


@pytest.fixture
def facts(tmp_path: Path) -> RunFacts:
    return RunFacts(tmp_path, project="birds", name="heron", offline=True, config=CONFIG, step=0, run_id=None)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in process._NO_TELEMETRY.items():
        monkeypatch.setenv(name, value)


def run(name: str, facts: RunFacts, rows: list[dict[str, Any]], ids: dict[str, str] | None = None) -> dict[str, str]:
    """A session of a run with one real tracker; the ids that its checkpoints would hold."""
    said: list[str] = []
    with Trackers(make_trackers([name]), facts, ids or {}, said.append) as trackers:
        for row in rows:
            trackers.row(row)
        trackers.finished()
    assert said == []
    return trackers.ids


def test_rows_become_numbers() -> None:
    assert [numbers_of(row) for row in ROWS] == NUMBERS


def test_configs_become_flat() -> None:
    assert CONFIG == {"optim.lr": 1e-4, "optim.betas": "[0.9, 0.95]", "adapter": "none", "stage": "sft"}


def events(folder: Path) -> list[Any]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    files = sorted((folder / FOLDER).iterdir(), key=lambda file: file.stat().st_mtime_ns)
    return [event for file in files for event in LegacyEventFileLoader(str(file)).Load()]


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """What TensorBoard shows: by tag and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / FOLDER))
    shown.Reload()
    return {tag: {one.step: one.value for one in shown.Scalars(tag)} for tag in shown.Tags()["scalars"]}


def test_tensorboard_reads_it_back(facts: RunFacts) -> None:
    assert run("tensorboard", facts, ROWS) == {"tensorboard": FOLDER}
    shown = scalars(facts.run)
    assert shown["train/loss"] == {1: 1.5, 3: 1.25}
    assert shown["eval/loss"] == {3: 1.125}
    assert any(b"optim.lr: 0.0001" in event.SerializeToString() for event in events(facts.run))


def test_tensorboard_withdraws_the_steps_that_a_resumed_run_repeats(
    facts: RunFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = run("tensorboard", facts, ROWS)
    later = time.time() + 2  # a file's name holds the second
    monkeypatch.setattr(time, "time", lambda: later)
    run("tensorboard", replace(facts, step=1), [{"current_steps": 2, "loss": 9.0}], ids)
    assert scalars(facts.run)["train/loss"] == {1: 1.5, 2: 9.0}


def wandb_records(folder: Path) -> list[Any]:
    """Records of the offline file: blocks of 32 KiB with (checksum, length, kind) before each piece."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    content, place, whole, records = file.read_bytes(), 7, b"", []
    while place + 7 <= len(content):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            records.append(record)
            whole = b""
    return records


def test_wandb_offline_holds_it(facts: RunFacts) -> None:
    ids = run("wandb", facts, ROWS)
    records = wandb_records(facts.run)
    while not any(record.WhichOneof("record_type") == "exit" for record in records):
        time.sleep(0.05)  # its own process writes the file, and finish does not wait for the disk
        records = wandb_records(facts.run)
    runs = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert {(one.project, one.display_name, one.run_id) for one in runs} == {("birds", "heron", ids["wandb"])}
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.setdefault(items["_step"], {}).update(items)
    assert found[1]["train/loss"] == 1.5
    assert (found[3]["train/loss"], found[3]["eval/loss"]) == (1.25, 1.125)
    assert "train/loss" not in found[2]


def test_wandb_goes_on_in_the_same_run(facts: RunFacts, tmp_path: Path) -> None:
    ids = run("wandb", facts, ROWS[:1])
    (tmp_path / "later").mkdir()
    assert run("wandb", replace(facts, run=tmp_path / "later", step=1), ROWS[1:], ids) == ids


def mlflow_client(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes seconds to set up
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{folder}/mlruns")
    from mlflow import MlflowClient

    return MlflowClient()


def test_mlflow_reads_it_back_and_goes_on(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    client = mlflow_client(facts.run, monkeypatch)
    ids = run("mlflow", facts, ROWS)
    assert run("mlflow", replace(facts, step=1), [*ROWS[1:], {"current_steps": 4, "loss": 1.0}], ids) == ids

    history = client.get_metric_history(ids["mlflow"], "train/loss")
    assert [(one.step, one.value) for one in history] == [(1, 1.5), (3, 1.25), (4, 1.0)], "no step twice"
    assert [one.step for one in client.get_metric_history(ids["mlflow"], "eval/loss")] == [3]
    data = client.get_run(ids["mlflow"])
    assert data.data.params["optim.lr"] == "0.0001"
    assert (data.info.status, data.info.run_name) == ("FINISHED", "heron")


def check_mlflow_without_a_store_named(facts: RunFacts, monkeypatch: pytest.MonkeyPatch, *, database: bool) -> None:
    """What `pip install surefoot[track]` brings, with no word of the environment. Its files are read as they lie."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    monkeypatch.chdir(facts.run)
    monkeypatch.setattr(adapters, "is_installed", lambda name: database or name != "sqlalchemy")
    ids = run("mlflow", facts, ROWS)
    (loss,) = facts.run.glob(f"mlruns/*/{ids['mlflow']}/metrics/train/loss")
    found = [line.split() for line in loss.read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in found] == [(1, 1.5), (3, 1.25)]
    assert (loss.parents[2] / "params" / "optim.lr").read_text() == "0.0001"


def test_mlflow_skinny_writes_into_a_folder_where_nothing_names_a_store(
    facts: RunFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_mlflow_without_a_store_named(facts, monkeypatch, database=False)


def test_twin_left_to_its_default_it_cannot_start(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_installed("sqlalchemy"):
        pytest.skip("the whole of MLflow is installed here, and its default works")
    with pytest.raises(AssertionError, match="UnsupportedModelRegistryStoreURI"):
        check_mlflow_without_a_store_named(facts, monkeypatch, database=True)


@pytest.mark.parametrize("store", ["sqlite:///runs.db", "postgresql+psycopg2://me:hunter2@host/runs"])
def test_a_database_that_mlflow_skinny_cannot_open_is_refused(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setattr(adapters, "is_installed", lambda name: name != "sqlalchemy")
    with raises_fault("SF-PACKAGE", "MLFLOW_TRACKING_URI", re.match("[a-z]+", store)[0]) as caught:
        require_trackers(["mlflow"])
    assert "hunter2" not in str(caught.value)
    require_trackers(["tensorboard"])
    for works in ("http://127.0.0.1:5000", "file:///tmp/runs", "runs"):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", works)
        require_trackers(["mlflow"])
    monkeypatch.setattr(adapters, "is_installed", lambda name: True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    require_trackers(["mlflow"])


TRACKIO = """
import json, os, sys
from pathlib import Path
from dataclasses import replace
from surefoot.system import process
from surefoot.report.trackers.adapters import make_trackers
from surefoot.report.trackers.adapters import RunFacts
from surefoot.report.trackers.fan_out import Trackers

process.refuse_telemetry()
rows, config, folder = json.loads(sys.argv[1])
facts = RunFacts(Path(folder), project="birds", name="heron", offline=True, config=config, step=0, run_id=None)
ids, names = {}, set()
for step, part in ((0, rows), (1, [*rows[1:], {"current_steps": 4, "loss": 1.0}])):
    said = []
    with Trackers(make_trackers(["trackio"]), replace(facts, step=step), ids, said.append) as trackers:
        for row in part:
            trackers.row(row)
        trackers.finished()
    ids = trackers.ids
    names.add(ids["trackio"])
    assert not said, said
with Trackers(make_trackers(["trackio"]), facts, {}, said.append) as other:  # another run in a folder of the same name
    other.row({"current_steps": 1, "loss": 7.0})
assert not said, said

from trackio.sqlite_storage import SQLiteStorage
print("READ", json.dumps([[SQLiteStorage.get_logs("birds", name) for name in (*names, other.ids["trackio"])],
                          SQLiteStorage.get_run_config("birds", *names), sorted(names), other.ids["trackio"]]))
os.environ["TRACKIO_SERVER_URL"] = "http://127.0.0.1:9"
from surefoot.report.trackers.adapters import Trackio
assert Trackio()._last_step("birds", *names) == -1, "the server may hold other steps than this machine"
"""


def test_trackio_gets_it_and_goes_on(tmp_path: Path) -> None:
    """In a process of its own: Trackio settles where its database is when it is imported."""
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    arguments = [sys.executable, "-c", TRACKIO, json.dumps([ROWS, CONFIG, str(tmp_path)])]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    (logs, others), config, (name,), other = json.loads(line.removeprefix("READ "))
    found = [(one["step"], {key: value for key, value in one.items() if "/" in key}) for one in logs]
    assert found == [*NUMBERS, (4, {"train/loss": 1.0})], "twice"
    assert config["optim.lr"] == 1e-4
    assert [one.startswith("heron-") for one in (name, other)] == [True, True]
    assert [one["train/loss"] for one in others] == [7.0]


def test_twin_that_goes_by_the_name_alone_mixes_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = TRACKIO.replace(
        "import json, os, sys", "import json, os, secrets, sys\nsecrets.token_hex = lambda count=None: 'x'"
    )
    monkeypatch.setitem(globals(), "TRACKIO", code)
    with pytest.raises(AssertionError, match="twice"):
        test_trackio_gets_it_and_goes_on(tmp_path)


class Flaky:
    """Fails where it is told to."""

    def __init__(self, *, start: bool = False, fail: int = 0):
        self.fail_start, self.fail = start, fail
        self.seen: list[int] = []
        self.status: Status | None = None

    def start(self, facts: RunFacts) -> str:
        if self.fail_start:
            raise ConnectionError("no route to https://me:hunter2@host/ with 0123456789abcdef0123456789abcdef01234567")
        return facts.run_id or "new"

    def log(self, step: int, numbers: Numbers) -> None:
        if self.fail:
            self.fail -= 1
            raise TimeoutError("too slow")
        self.seen.append(step)

    def finish(self, status: Status) -> None:
        self.status = status


def session(facts: RunFacts, tracker: Flaky, *, count: int = 4, error: type[BaseException] | None = None) -> list[str]:
    said: list[str] = []
    outcome = pytest.raises(error) if error else contextlib.nullcontext()
    with outcome, Trackers({"flaky": tracker}, facts, {}, said.append) as trackers:
        for step in range(1, count + 1):
            trackers.row({"current_steps": step, "loss": 1.0})
        if error:
            raise error
        trackers.finished()
    return said


def test_a_start_that_fails_leaves_the_tracker_out(facts: RunFacts) -> None:
    (text,) = session(facts, Flaky(start=True))
    assert text.startswith("flaky ")
    assert gives(text, "ConnectionError")
    assert "hunter2" not in text
    assert "0123456789abcdef" not in text


class Late(Flaky):
    """Starts when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may, self.has = threading.Event(), threading.Event()

    def start(self, facts: RunFacts) -> str:
        self.may.wait(10)
        return super().start(facts)

    def log(self, step: int, numbers: Numbers) -> None:
        super().log(step, numbers)
        self.has.set()


def check_a_late_start_stops_no_step(facts: RunFacts) -> None:
    tracker, said = Late(), []
    with Trackers({"late": tracker}, facts, {}, said.append) as trackers:
        assert [text.split()[0] for text in said] == ["late"]
        ids = trackers.ids
        trackers.row({"current_steps": 1, "loss": 1.0})
        assert ids == {}
        tracker.may.set()
        assert tracker.has.wait(10)
        trackers.row({"current_steps": 2, "loss": 1.0})
        assert ids == {"late": "new"}, "the next checkpoint holds it"
        fan_out.PATIENCE = 10.0
    assert tracker.seen == [1, 2]


def test_a_late_start_stops_no_step(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "PATIENCE", 0.05)
    check_a_late_start_stops_no_step(facts)


def test_twin_that_waits_for_the_start(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "PATIENCE", 0.05)
    monkeypatch.setattr(Late, "start", lambda tracker, facts: "new")
    with pytest.raises(AssertionError):
        check_a_late_start_stops_no_step(facts)


def test_the_id_of_an_earlier_session_is_kept_where_the_start_fails(facts: RunFacts) -> None:
    with Trackers({"flaky": Flaky(start=True)}, facts, {"flaky": "old"}, lambda text: None) as trackers:
        trackers.row({"current_steps": 1, "loss": 1.0})
    assert trackers.ids == {"flaky": "old"}


def test_a_failure_is_said_once_and_its_rows_are_tried_again(facts: RunFacts) -> None:
    tracker = Flaky(fail=2)
    (text,) = session(facts, tracker)
    assert (text.split()[0], gives(text, "TimeoutError")) == ("flaky", True)
    assert tracker.seen == [1, 2, 3, 4]
    assert tracker.status == "finished"


def test_twin_without_a_second_try_rows_are_lost(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(thread: Any) -> None:
        thread._tracker.log(*thread._pending.pop(0))

    monkeypatch.setattr(fan_out._Thread, "_send", send)
    with pytest.raises(AssertionError):
        test_a_failure_is_said_once_and_its_rows_are_tried_again(facts)


def test_a_tracker_that_keeps_failing_is_left_alone(facts: RunFacts) -> None:
    tracker = Flaky(fail=10**6)
    said = session(facts, tracker, count=20)
    assert [f" {MOST_FAILURES} " in text for text in said] == [False, True]
    assert tracker.fail == 10**6 - MOST_FAILURES


@pytest.mark.parametrize(("error", "status"), [(None, "finished"), (KeyboardInterrupt, "stopped"), (OSError, "failed")])
def test_the_tracker_hears_how_it_ended(facts: RunFacts, error: type[BaseException] | None, status: Status) -> None:
    tracker = Flaky()
    session(facts, tracker, error=error)
    assert tracker.status == status


def test_a_tracker_that_hangs_stops_no_step(facts: RunFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan_out, "PATIENCE", 0.1)
    release = threading.Event()
    tracker = Flaky()
    monkeypatch.setattr(tracker, "log", lambda *_: release.wait())
    (text,) = session(facts, tracker)
    release.set()
    assert text.startswith("flaky ")


def test_what_is_not_installed_is_refused_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "is_installed", lambda name: name == "wandb")
    require_trackers(["wandb"])
    place = "SF-PACKAGE", "report_to"
    with raises_fault(*place, "mlflow", remedy=["mlflow", "trackio"], also=[(*place, "trackio")]):
        require_trackers(["wandb", "mlflow", "trackio"])


def test_telemetry_of_others_is_refused_unless_the_user_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in process._NO_TELEMETRY:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DO_NOT_TRACK", "0")
    process.refuse_telemetry()
    assert os.environ["DO_NOT_TRACK"] == "0"
    assert os.environ["WANDB_ERROR_REPORTING"] == "false"
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
