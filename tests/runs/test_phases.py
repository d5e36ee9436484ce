"""What went by before step 1 is told by phases, and nothing is told twice."""

from __future__ import annotations

import io
import json
import re

import pytest

from helpers.model_layouts import run_config
from helpers.tiny_models import tiny_llama
from surefoot.report.console import Console
from surefoot.runs import profiling as phases
from surefoot.runs.profiling import Phases
from surefoot.runs.run import train_run


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """What `Phases` takes the time to be."""
    now = [100.0]
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    return now


def test_each_phase_has_what_went_by_since_the_last(clock):
    found = Phases(imports=5.0)
    for phase, seconds in (("data", 0.25), ("probes", 0.01), ("model", 1.5), ("data", 0.5)):
        clock[0] += seconds
        found.end(phase)
    assert found.to_json() == {"imports": 5.0, "data": 0.75, "probes": 0.01, "model": 1.5}
    assert found.sentence() == "ready in 7.3 s: imports 5.0, data 0.8, model 1.5"


def test_without_a_process_of_its_own_imports_are_not_told(clock):
    found = Phases()
    assert found.sentence() == "ready in 0.0 s"
    assert found.to_json() == {}


def test_a_run_tells_its_phases_and_records_them(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps([{"instruction": "Say.", "input": "", "output": "sky"}] * 4))
    tiny_llama(tmp_path / "base")
    config = run_config(
        model=str(tmp_path / "base"),
        data={"train": str(tmp_path / "rows.json"), "max_length": 64},
        batch={"size": 2},
        duration="1 step",
        output=str(tmp_path / "run"),
    )
    screen = io.StringIO()
    assert train_run(config, "new", Console(screen)) == 0
    [rank] = json.loads((tmp_path / "run" / "environment.json").read_text())["ranks"]
    assert rank["start_seconds"].keys() == {"planning", "data", "probes", "model", "comparison"}
    [told] = re.findall(r"ready in ([\d.]+) s", screen.getvalue())
    assert float(told) == pytest.approx(sum(rank["start_seconds"].values()), abs=0.06)  # rounded to a tenth
