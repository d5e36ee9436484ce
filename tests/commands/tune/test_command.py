"""`surefoot tune` on a tiny model: real trials in real processes. Lines and picture of a tuning say what was tried,
what was not taken and why."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from helpers import zoo
from helpers.faults import gives
from helpers.tune_trials import made_up
from surefoot.commands.main import main as cli
from surefoot.commands.terminal import INTERRUPTED_EXIT_CODE
from surefoot.commands.tune import outcome
from surefoot.commands.tune import trials as gate
from surefoot.commands.tune.attempt import Answer, Workshop
from surefoot.commands.tune.command import _free_folder
from surefoot.commands.tune.outcome import outcome_lines, picture, trial_line
from surefoot.commands.tune.search import Tried
from surefoot.config.load import load_config
from surefoot.runs.run_folder import inspect_folder
from surefoot.system.errors import STOPPED_EXIT_CODE

# All but the number of examples at once is set: a search of two settings.
CONFIG = """\
stage: sft
model: llama3
data: {train: train.json, max_length: 64, workers: 0, packing: off}
adapter: {kind: lora, rank: 4}
precision: fp32
attention: sdpa
compile: off
gradient_checkpointing: off
batch: {size: 2}
duration: 3 steps
output: runs/tuned
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return zoo.llama3(tmp_path_factory.mktemp("base") / "llama3")


@pytest.fixture
def place(base, tmp_path, monkeypatch):
    (tmp_path / "llama3").symlink_to(base)
    rows = [{"instruction": f"say {n}", "output": f"it is {n}"} for n in range(9)]
    (tmp_path / "train.json").write_text(json.dumps(rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def tune(*words):
    return CliRunner().invoke(cli, ["tune", *words])


def written(place, name="run-tuned.yaml"):
    return yaml.safe_load((place / name).read_text(encoding="utf-8"))


def test_a_config_and_a_picture_are_written_and_nothing_else(place, any_python, monkeypatch):
    monkeypatch.setattr(sys, "executable", any_python)
    before = {path.name for path in place.iterdir()}
    result = tune("run.yaml", "--seconds", "0.5")
    assert result.exit_code == 0, result.output
    assert {path.name for path in place.iterdir()} - before == {"run-tuned.yaml", "run-tuned.png"}
    tuned = written(place)
    assert tuned["batch"]["micro"] in (1, 2, "auto")
    assert (tuned["batch"]["size"], tuned["precision"]) == (2, {"compute": "fp32"})
    assert load_config("run-tuned.yaml").config.output == "runs/tuned"
    assert next_command(result) in (["train", "run.yaml"], ["train", "run-tuned.yaml"])
    again = tune("run.yaml")
    assert (again.exit_code, again.stderr.split()[-1]) == (2, "[SF-USE-OUTPUT]")


def next_command(result):
    """What is printed to be typed next, behind `surefoot`."""
    return shlex.split(result.output.partition("next: surefoot ")[2].splitlines()[0])


@pytest.fixture
def measured(monkeypatch):
    """Trials of no length. Gives how many were taken, at which Ctrl-C comes, and the seconds of one example at once."""
    state = {"taken": 0, "ctrl-c": 0, "fast": 0.5}

    def attempt(self, request, *, limit=None):
        state["taken"] += 1
        if state["taken"] == state["ctrl-c"]:
            raise KeyboardInterrupt
        return Answer(made_up(state["fast"] if request.config["batch"].get("micro") == 1 else 1.0))

    monkeypatch.setattr(Workshop, "attempt", attempt)
    return state


def test_what_is_faster_is_trained_next(place, measured):
    assert next_command(tune("run.yaml")) == ["train", "run-tuned.yaml"]


def test_a_setting_whose_numbers_are_off_is_not_taken(place, measured, monkeypatch):
    monkeypatch.setattr(gate, "LOSS_GATE", {"fp32": -1.0})
    result = tune("run.yaml")
    assert (result.exit_code, result.stderr.split()[-1]) == (3, "[SF-TUNE]"), result.output
    assert not (place / "run-tuned.yaml").exists()


@pytest.mark.parametrize("there", [(), ("tuned",), ("tuned", "tuned-tuned")], ids=len)
def test_what_is_faster_goes_to_a_folder_of_its_own(place, measured, there):
    """The first is the twin: where nothing has been trained, the folder stays."""
    for name in there:
        (place / "runs" / name).mkdir(parents=True)
        (place / "runs" / name / "config.yaml").touch()
    result = tune("run.yaml")
    output = load_config("run-tuned.yaml").config.output
    assert output == "runs/tuned" + ["", "-tuned", "-tuned-2"][len(there)]
    assert (output in result.output) == bool(there)


@pytest.mark.parametrize("there", [False, True])
def test_where_the_plans_own_stays_the_command_offered_is_not_refused(place, measured, there):
    """What is printed as next is typed; a folder in use is the twin of one that is not."""
    measured["fast"] = 1.0
    if there:
        (place / "runs" / "tuned").mkdir(parents=True)
        (place / "runs" / "tuned" / "config.yaml").touch()
    words = next_command(tune("run.yaml", "optim.lr=1e-4"))
    assert words == ["train", "run.yaml", "optim.lr=1e-4", *(["output=runs/tuned-tuned"] if there else [])]
    assert inspect_folder(load_config(words[1], words[2:]).config, "new").folder == Path(
        "runs/tuned-tuned" if there else "runs/tuned"
    )
    assert (place / "run-tuned.yaml").is_file()


def test_what_a_launcher_left_is_no_run(place):
    """`tune` and `train` go by one rule."""
    (place / "runs" / "tuned").mkdir(parents=True)
    (place / "runs" / "tuned" / "training.log").touch()
    assert _free_folder("runs/tuned") == "runs/tuned"
    (place / "runs" / "tuned" / "other.log").touch()
    assert _free_folder("runs/tuned") == "runs/tuned-tuned"


def test_the_verdict_and_the_figures_beside_it_are_of_the_same_minutes(place, measured, monkeypatch):
    """One example at once seemed twice as fast; in turns it is not."""
    seen = []

    def attempt(self, request, *, limit=None):
        seen.append(request.config["batch"].get("micro"))
        return Answer(made_up(0.5 if seen[-1] == 1 and seen.count(1) == 1 else 1.0))

    monkeypatch.setattr(Workshop, "attempt", attempt)
    result = tune("run.yaml", "--out", "found.yaml", "--json")
    found = json.loads(result.stdout)
    assert found["tried"][1]["rate"] == 2 * found["tried"][0]["rate"]
    assert [one["rate"] for one in found["turns"]] == [found["start"]["rate"]] * 2
    assert found["best"] == found["start"]


def test_a_slash_at_its_end_leads_into_no_other_run(tmp_path):
    (tmp_path / "run" / "checkpoint-1").mkdir(parents=True)
    assert _free_folder(f"{tmp_path}/run/") == f"{tmp_path}/run-tuned"


def test_ctrl_c_writes_the_best_so_far_and_the_same_command_goes_on(place, measured):
    assert tune("run.yaml", "--out", "whole.yaml").exit_code == 0
    whole = measured["taken"]
    measured.update({"taken": 0, "ctrl-c": whole})
    result = tune("run.yaml")
    assert result.exit_code == STOPPED_EXIT_CODE, result.output
    best = written(place)
    assert best["batch"]["micro"] == 1
    assert (place / "run-tuned.trials.jsonl").is_file()
    measured.update({"taken": 0, "ctrl-c": 0})
    result = tune("run.yaml", "--json")
    assert result.exit_code == 0, result.output
    assert measured["taken"] == 1
    assert not (place / "run-tuned.trials.jsonl").exists()
    assert written(place) == best
    assert tune("run.yaml").exit_code == 2, "it is finished, and somebody's file now"


def test_ctrl_c_before_anything_is_known_writes_nothing(place, measured):
    measured["ctrl-c"] = 2
    assert tune("run.yaml").exit_code == INTERRUPTED_EXIT_CODE
    assert not (place / "run-tuned.yaml").exists()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["data.train=nowhere.json"], 2, "nowhere.json"),
        (["model=nowhere"], 2, "nowhere"),
        (["batch.mikro=2"], 2, "batch.mikro"),
        (["attention=eager", "data.packing=on"], 2, "attention"),
        (["--seconds", "0"], 2, "--seconds"),
        (["--out", "llama3"], 2, "llama3"),
    ],
)
def test_a_wrong_input_is_one_line_and_nothing_is_written(place, words, code, said):
    before = {path.name for path in place.iterdir()}
    result = tune("run.yaml", *words)
    assert result.exit_code == code
    assert len(result.stderr.strip().splitlines()) <= 3, "a line, and where there is one the excerpt with its caret"
    assert said in result.stderr
    assert result.stdout == ""
    assert {path.name for path in place.iterdir()} == before


START = Tried({"batch.micro": "auto", "compile": "off"}, 1000.0, 2**20)
FAST = Tried({"batch.micro": 8, "compile": "off"}, 1500.0, 2**21)
SLOW = Tried({"batch.micro": 1, "compile": "off"}, 250.0, 2**20, early=True)
WRONG = Tried({"batch.micro": 4, "compile": "off"}, 2000.0, 2**20, failure="wrong")
LARGE = Tried({"batch.micro": 16, "compile": "off"}, failure="large")


def numbers(line):
    return re.findall(r"(?<!\w)[-+]?\d[\d,.]*%?", line)


def test_a_line_for_each():
    own, *lines = [trial_line(3, one, START) for one in (START, FAST, SLOW, WRONG, LARGE)]
    assert numbers(own) == ["3", "1,000", "1.0"]
    assert not gives(own, "batch.micro")
    assert [numbers(line) for line in lines] == [
        ["3", "1,500", "+50%", "2.0", "8"],
        ["3", "250", "-75%", "1.0", "1,"],
        ["3", "2,000", "+100%", "1.0", "4"],
        ["3", "16"],
    ]
    assert all(gives(line, "batch.micro") for line in lines)
    assert [line.split()[-1] for line in lines] == ["8", "early", "wrong", "large"]


def test_the_account():
    left_out = [("data.workers", "set")]
    fixed, disturbed, best = outcome_lines((START, FAST), (), FAST, left_out, held_up=0.4)
    assert fixed.endswith(" data.workers, set")
    assert gives(disturbed, "40%")
    assert numbers(best) == ["8", "1,500", "2.0", "1.50", "1,000", "1.0"]
    assert gives(best, "batch.micro")
    (none,) = outcome_lines((START,), (), START, [])
    assert numbers(none) == ["1,000"]


def test_what_decides_has_lines_of_its_own_under_the_numbers_it_had():
    again = replace(START, rate=600.0), replace(FAST, rate=606.0)
    own, fast, verdict = outcome_lines((START, SLOW, FAST), again, again[0], [])
    assert own.split()[:2] == ["1", "600"]
    assert (fast.split()[0], fast.split()[1], fast.split()[3]) == ("3", "606", "+1%")
    assert gives(verdict, 600)
    assert "1,000" not in f"{own}{fast}{verdict}"  # of the first minutes, beside which 606 would be -39 %


def test_a_picture_of_whatever_there_is():
    for tried, best in (
        ((START, FAST, SLOW, WRONG, LARGE), FAST),
        ((START,), START),
        ((LARGE, FAST), FAST),
    ):
        assert picture(tried, tried[0], best, "run").startswith(b"\x89PNG")


@pytest.mark.parametrize("held_up", [0.0, 0.4])
def test_the_picture_says_what_spoils_its_figures(monkeypatch, held_up):
    monkeypatch.setattr(outcome, "png", lambda figure: figure)
    said = picture((START, FAST), START, FAST, "run", held_up=held_up).get_suptitle()
    assert "40%" in said if held_up else said == ""
