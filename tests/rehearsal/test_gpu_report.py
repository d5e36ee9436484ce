"""`make gpu-report` on the pretend GPU, from its words to its page."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.benchmark_programs import ROOT
from rehearsal.runs import ON_THE_PRETEND_GPU

pytestmark = ON_THE_PRETEND_GPU


def gpu_report(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "gpu_report"), "--rehearse", "--out", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True)


def states(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "report.json").read_text())
    return {name: part["state"] for name, part in found["parts"].items()}


def test_a_second_call_goes_on(tmp_path):
    done = gpu_report(tmp_path, "--only", "machine")
    assert done.returncode == 0, done.stderr
    assert states(tmp_path) | {"machine": "done"} == states(tmp_path)
    assert {state for name, state in states(tmp_path).items() if name != "machine"} == {"left out"}
    first = (tmp_path / "parts" / "machine.json").stat().st_mtime_ns
    done = gpu_report(tmp_path, "--only", "machine", "cudnn")
    assert done.returncode == 0, done.stderr
    assert (states(tmp_path)["cudnn"], (tmp_path / "parts" / "machine.json").stat().st_mtime_ns) == ("done", first)
    assert "A rehearsal" in (tmp_path / "report.html").read_text()


WRONG = {
    "a part that there is not": (["--only", "cuddn"], "no part 'cuddn'"),
    "results of another machine": ([], "has results of another kind (device H200"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_begins_nothing(tmp_path, wrong):
    words, said = WRONG[wrong]
    identity = {"device": "H200", "torch": "2", "surefoot": "a", "kind": "measurement"}
    (tmp_path / "identity.json").write_text(json.dumps(identity))
    done = gpu_report(tmp_path, *words)
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "report.json").exists()


@pytest.mark.slow
def test_the_whole_report(tmp_path):
    """Every part comes to its end; one comparison stands for all."""
    done = gpu_report(tmp_path, "--minutes", "60")
    assert done.returncode == 0, done.stderr
    found = states(tmp_path)
    left = {name for name, state in found.items() if state == "left out"}
    assert {name for name, state in found.items() if state != "done"} == left, done.stdout
    assert left == {name for name in found if name.startswith("cell-")} - {"cell-1b-lora"}
    parts = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert all(run["resumed"] == [] for run in parts["runs"]["found"].values())
    assert all(row["has_parity"] for row in parts["cell-1b-lora"]["found"]["rows"])
    again = gpu_report(tmp_path, "--minutes", "0.1")
    assert again.stdout.count("done before") == len(found) - len(left)
