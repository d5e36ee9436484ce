"""The quickstart as a user meets it: from chance to nearly everything right, through the path of every other run."""

import html
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from surefoot.commands.main import main
from surefoot.commands.quickstart import world
from surefoot.commands.quickstart.command import quickstart_config
from surefoot.commands.quickstart.score import score
from surefoot.methods.open_model import open_for_use
from surefoot.report.verification import verify_folder

pytestmark = pytest.mark.pictures
SEED = 5
PROMISED = 0.90  # held-out accuracy after training; measured over seeds 1 to 5 and all three kinds: 1.0
AT_CHANCE = 0.20


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A whole LoRA quickstart: its run folder, and what it printed."""
    run = tmp_path_factory.mktemp("quickstart") / "run"
    result = CliRunner().invoke(main, ["quickstart", "--out", str(run), "--seed", str(SEED)])
    assert result.exit_code == 0, result.output
    return run, result.output


@pytest.fixture(scope="module")
def asked(finished):
    """What the saved adapter answers to the held-out questions."""
    saved = open_for_use(str(finished[0]))
    return score(saved.model, saved, world.instructions(SEED)[1])


def test_accuracy_rises_from_chance_and_is_recorded(finished):
    run, _ = finished
    results = json.loads((run / "all_results.json").read_text())
    assert results["chance"] == 0.125
    assert results["accuracy_before"] < AT_CHANCE
    assert results["accuracy_after"] >= PROMISED
    assert results["exact_after"] >= PROMISED


def test_the_saved_adapter_answers_as_the_trained_model_did(finished, asked):
    results = json.loads((finished[0] / "all_results.json").read_text())
    assert (asked.accuracy, asked.exact) == (results["accuracy_after"], results["exact_after"])


def test_twin_it_learned_the_rooms_of_this_museum_and_no_other(asked):
    rooms, others = world.museum(SEED), world.museum(SEED + 1)
    new_room = {f"In the {rooms[group]} room.": f"In the {others[group]} room." for group in rooms}
    _, held_out = world.instructions(SEED)
    there = [new_room[record["output"]] == answer for record, answer in zip(held_out, asked.written, strict=True)]
    unmoved = sum(rooms[group] == others[group] for group in rooms) / len(rooms)
    assert sum(there) / len(there) == pytest.approx(unmoved, abs=1 - PROMISED)
    assert unmoved < 0.5


def test_it_prints_plan_progress_answers_places_and_next_commands(finished):
    run, printed = finished
    for part in ("computes ", "template", "step 96/96", "before training: ", "guessing", "training_loss.png"):
        assert part in printed
    assert len(re.findall(r"^    before:  ", printed, re.MULTILINE)) == 3
    assert len(re.findall(r"^    after:   In the \w+ room\.$", printed, re.MULTILINE)) == 3
    results = json.loads((run / "all_results.json").read_text())
    row = [f"{results[key]:.1%}" for key in ("accuracy_before", "accuracy_after", "chance")]
    assert row[2] == "12.5%"
    assert [line for line in printed.splitlines() if line.split()[-3:] == row]
    last = [line.strip() for line in printed.splitlines()[-4:]]
    assert [line.split()[:2] for line in last] == [["surefoot", c] for c in ("chat", "generate", "verify", "train")]
    assert (run / "training_loss.png").is_file()
    page = html.unescape((run / "report.html").read_text(encoding="utf-8"))
    assert all(line in page for line in last[:3])


def test_a_pipe_gets_plain_lines(finished):
    _, printed = finished
    assert "\r" not in printed
    assert "\x1b" not in printed


def test_the_run_verifies_and_its_config_runs_again(finished):
    run, _ = finished
    assert all(not check.faults for check in verify_folder(run))
    again = run.with_name("again")
    result = CliRunner().invoke(main, ["train", str(run / "config.yaml"), f"output={again}", "--dry-run"])
    assert result.exit_code == 0, result.output


def test_resuming_a_finished_quickstart_changes_nothing(finished):
    run, _ = finished
    before = {path.name: path.stat().st_mtime_ns for path in run.iterdir()}
    result = CliRunner().invoke(main, ["quickstart", "--out", str(run), "--seed", str(SEED), "--resume"])
    assert result.exit_code == 0
    assert {path.name: path.stat().st_mtime_ns for path in run.iterdir()} == before


def test_an_occupied_folder_is_refused_before_anything_is_written(tmp_path: Path):
    run = tmp_path / "mine"
    run.mkdir()
    (run / "thesis.txt").write_text("years")
    for flags in ([], ["--overwrite"]):
        result = CliRunner().invoke(main, ["quickstart", "--out", str(run), *flags])
        assert result.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (run / "thesis.txt").read_text() == "years"


def test_contradicting_flags_are_refused(tmp_path: Path):
    arguments = ["quickstart", "--out", str(tmp_path / "run"), "--resume", "--overwrite"]
    assert CliRunner().invoke(main, arguments).exit_code == 2


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_the_other_kinds_are_configured(kind, tmp_path: Path):
    config = quickstart_config(tmp_path / "run", tmp_path / "data", kind, seed=1)
    assert (config.adapter.kind if config.adapter else "full") == kind


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "full"])
def test_the_other_kinds_learn_as_well(kind, tmp_path: Path):
    run = tmp_path / kind
    result = CliRunner().invoke(main, ["quickstart", "--out", str(run), "--adapter", kind])
    assert result.exit_code == 0, result.output
    assert json.loads((run / "all_results.json").read_text())["accuracy_after"] >= PROMISED
