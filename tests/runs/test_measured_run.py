"""A run that leaves everything open, on a model wide enough that the machine is measured for it. The other tests train
narrow models, for which nothing is."""

import json

import pytest

from helpers.growing_records import sky_workplace
from helpers.path_runs import forget, path_config, start, weights
from surefoot.planning.precision import NARROW
from surefoot.runs import make_plan as planned

STEPS = 3


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    return sky_workplace(tmp_path_factory, 22, hidden=NARROW)


def train(workplace, output, mode="new"):
    ways = {"adapter": {"kind": "dora", "rank": 4}, "batch": {"size": 8}, "duration": f"{STEPS} steps"}
    checkpoint = {"every": "1 step", "keep": STEPS}
    start(path_config(workplace, output, data={"eval": 2}, checkpoint=checkpoint, **ways), mode)
    return json.loads((output / "plan.json").read_text())["plan"]


def test_what_is_left_open_is_measured_and_kept(workplace, tmp_path, monkeypatch):
    plan = train(workplace, tmp_path / "run")
    seen = plan["measurements"]
    assert {trial["form"] for trial in seen["documents"]} >= {"padded", "sdpa", "matmul"}
    assert {trial["part"] for trial in seen["pointwise"]} == {"norm", "rotary"}
    assert plan["kernels"]["pointwise"]["source"] == "measured"
    assert seen["products"]
    assert seen["attention"]
    assert plan["kernels"]["documents"]["source"] == "measured"
    assert plan["kernels"]["last_block"]["value"] == "pruned"
    trained = weights(tmp_path / "run")
    forget(tmp_path / "run", [STEPS])

    def measured_again(*asked):
        raise AssertionError("a run that goes on measures nothing")

    monkeypatch.setattr(planned, "measure_open_choices", measured_again)
    assert train(workplace, tmp_path / "run", "resume") == plan
    assert weights(tmp_path / "run") == trained
