"""A run that is resumed with another duration: said before its next step, kept in its events, shown by its report, and
undone by the command that it names."""

import html
import io
import json
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from helpers.faults import gives
from helpers.tiny_models import tiny_llama
from surefoot.config.load import load_config
from surefoot.report.console import Console
from surefoot.report.events import append_event, cut_events
from surefoot.report.journal import salvage
from surefoot.report.status import verdict
from surefoot.runs import run
from surefoot.runs import run_folder as changes
from surefoot.runs.run_folder import inspect_folder


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """my-run.yaml with two epochs, and a run of one epoch, by an override, of which a checkpoint is left."""
    folder = tmp_path_factory.mktemp("changed")
    tiny_llama(folder / "base")
    rows = [{"instruction": f"Say sky {n} times.", "input": "", "output": "sky " * n} for n in range(1, 5)]
    (folder / "rows.json").write_text(json.dumps(rows))
    config = {
        "stage": "sft",
        "model": str(folder / "base"),
        "adapter": {"kind": "lora", "rank": 2},
        "data": {"train": str(folder / "rows.json")},
        "precision": "fp32",
        "batch": {"size": 2},
        "optim": {"lr": 1e-3},
        "duration": "2 epochs",
        "checkpoint": {"every": "1 step"},
        "output": str(folder / "run"),
    }
    (folder / "my-run.yaml").write_text(yaml.safe_dump(config))
    start(folder, "new", "duration=1 epoch")
    shutil.rmtree(folder / "run" / "checkpoint-2")
    (folder / "run" / "MANIFEST.json").unlink()
    return folder


def start(folder: Path, mode, *overrides: str) -> str:
    said = io.StringIO()
    typed = ["surefoot", "train", "my-run.yaml"]
    config = load_config(folder / "my-run.yaml", overrides).config
    assert run.train_run(config, mode, Console(said), run.RunOptions(typed)) == 0, said.getvalue()
    return said.getvalue()


def events(folder: Path) -> list[tuple[str, int, str]]:
    found, damaged = salvage(folder / "events.jsonl")
    assert not damaged
    return [(event["kind"], event["step"], event["text"]) for event in found]


@pytest.fixture
def again(killed, tmp_path) -> Path:
    """A copy of its own."""
    folder = Path(shutil.copytree(killed, tmp_path / "again"))
    text = (folder / "my-run.yaml").read_text().replace(str(killed / "run"), str(folder / "run"))
    (folder / "my-run.yaml").write_text(text)
    return folder


def test_it_is_said_kept_and_shown(again):
    with (again / "run" / "events.jsonl").open("a") as file:
        file.write('{"kind": "sav')  # a power failure's half line takes nothing along
    said = start(again, "resume")
    told = [(kind, step) for kind, step, _ in events(again / "run")]
    assert ("changed", 1) in told
    assert told[told.index(("changed", 1)) + 1] == ("resume", 1)
    changed = events(again / "run")[told.index(("changed", 1))][2]
    assert changed.startswith("duration ")
    assert gives(changed, 1)
    assert gives(changed, 2)
    before_the_step, _, _ = said.partition("step 2/4")
    before_it_was_ready, command, _ = before_the_step.replace("\n", " ").partition(
        f"surefoot train {again}/run/config.yaml 'duration=1 epoch' --resume"
    )
    assert changed in before_it_was_ready
    assert command
    assert changed in html.unescape((again / "run" / "report.html").read_text())


def test_twin_unnoted_it_is_in_no_event_and_no_report(again, monkeypatch):
    monkeypatch.setattr(run, "note_changes", lambda found: None)
    monkeypatch.setattr(run, "reminder", lambda found, command: [])
    with pytest.raises(AssertionError):
        test_it_is_said_kept_and_shown(again)


def test_a_resumed_run_says_where_it_goes_on_and_not_the_whole_plan(again):
    said = start(again, "resume", "batch.micro=1")
    resumed, changed = [line for line in said.splitlines() if gives(line, 4) or line.startswith("  batch.micro ")][:2]
    assert gives(resumed, 1)
    assert changed.startswith("  batch.micro ")
    assert "\ntrains " not in said
    assert "\nexample " not in said
    assert (again / "run" / "plan.json").is_file()


def test_twin_a_first_start_says_all(again):
    shutil.rmtree(again / "run")
    said = start(again, "resume")
    assert "\ntrains " in said
    assert "\nexample " in said
    assert "\n  batch.micro " not in said


def test_what_was_there_before_says_nothing(again):
    said = start(again, "resume", "duration=1 epoch")
    assert "duration=" not in said  # no command to keep the old one
    assert "changed" not in {kind for kind, _, _ in events(again / "run")}


def test_the_command_has_the_old_values(again):
    found = inspect_folder(load_config(again / "my-run.yaml").config, "resume")
    command = shlex.split(changes.reminder(found, command=True)[-1])
    assert command[:2] == ["surefoot", "train"]
    assert command[-1] == "--resume"
    (again / "run" / "config.yaml").write_text((again / "my-run.yaml").read_text())  # as the changed run leaves it
    as_before = load_config(again / "my-run.yaml", ["duration=1 epoch"]).config
    assert load_config(command[2], command[3:-1]).config == as_before
    assert changes.reminder(found, command=False) == []


def test_it_stays_when_the_run_goes_back_behind_it(tmp_path):
    append_event(tmp_path, "changed", 7, "duration")
    append_event(tmp_path, "saved", 7, "saved checkpoint-7")
    cut_events(tmp_path, 3, evaluated=True)
    assert events(tmp_path) == [("changed", 7, "duration")]
    found = salvage(tmp_path / "events.jsonl")[0]
    assert verdict("finished", [], found).sentence != verdict("finished", [], []).sentence
