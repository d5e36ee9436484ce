"""flight.jsonl: every step, only the last ones, and cut where a run goes on."""

import json

import pytest

from surefoot.report import flight
from surefoot.report.flight import FLIGHT, KEPT, FlightRing, flight_line, recent, unfinished
from surefoot.training.report import StepReport


def report(step, **changes):
    values = {
        "step": step,
        "loss": 1.0,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "weight": 9,
        "tokens": 40,
        "examples": (step, "a.json:7"),
        "decision": "stepped",
        "non_finite": None,
        "seconds": 0.25,
    }
    return StepReport(**{**values, **changes})


def steps_in(run):
    return [line["step"] for line in recent(run)]


def test_a_line_has_what_a_step_is_known_by():
    line = flight_line(report(3, loss=None, non_finite="loss", decision="non_finite", scale=1024.0), seed=42)
    assert line.pop("time") > 1e9
    assert line == {
        "step": 3,
        "decision": "non_finite",
        "loss": None,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "weight": 9,
        "tokens": 40,
        "seconds": 0.25,
        "seed": 42,
        "examples": [3, "a.json:7"],
        "non_finite": "loss",
        "scale": 1024.0,
    }
    many = flight_line(report(1, examples=tuple(range(2000))), seed=0)
    assert (len(many["examples"]), many["more_examples"]) == (512, 2000 - 512)


def test_the_file_is_bounded_and_has_the_last_steps(tmp_path):
    ring = FlightRing(tmp_path, 1)
    ring.begin()
    most = 0
    for step in range(1, 5 * KEPT + 8):
        ring.begins(step, [(step,)])
        ring.add(report(step))
        most = max(most, (tmp_path / FLIGHT).read_text().count("\n")) if step % 40 == 0 else most
    assert most <= 4 * KEPT  # two lines for each step
    found = steps_in(tmp_path)
    assert found == list(range(found[0], 5 * KEPT + 8))
    assert KEPT <= len(found) < 2 * KEPT


def test_twin_a_ring_that_never_cuts_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(flight, "KEPT", 10**6)
    ring = FlightRing(tmp_path, 1)
    for step in range(1, 2 * KEPT + 8):
        ring.add(report(step))
    assert len(steps_in(tmp_path)) > 2 * KEPT


@pytest.mark.parametrize(("start", "left"), [(0, []), (3, [1, 2, 3]), (9, [1, 2, 3, 4, 5])])
def test_steps_that_are_done_again_go(tmp_path, start, left):
    ring = FlightRing(tmp_path, 1)
    for step in range(1, 6):
        ring.add(report(step))
    with (tmp_path / FLIGHT).open("a") as file:
        file.write('{"step": 6, "los')  # a power failure
    FlightRing(tmp_path, 1, start).begin()
    assert steps_in(tmp_path) == left
    assert all(json.loads(line) for line in (tmp_path / FLIGHT).read_text().splitlines())


def test_a_step_is_known_before_it_is_computed(tmp_path):
    ring = FlightRing(tmp_path, 42)
    ring.begins(1, [(4, 2), ("a.json:7",)])
    begun = unfinished(tmp_path)
    assert begun.pop("time") > 1e9
    assert begun == {"begins": 1, "seed": 42, "sizes": [2, 1], "examples": [4, 2, "a.json:7"]}
    assert recent(tmp_path) == []
    ring.add(report(1))
    assert unfinished(tmp_path) is None
    assert steps_in(tmp_path) == [1]
    ring.begins(2, [(1,) * 600])
    many = unfinished(tmp_path)
    assert (many["begins"], len(many["examples"]), many["more_examples"]) == (2, 512, 88)
    FlightRing(tmp_path, 42, start=1).begin()  # the next process, which takes it again
    assert unfinished(tmp_path) is None
    assert steps_in(tmp_path) == [1]
