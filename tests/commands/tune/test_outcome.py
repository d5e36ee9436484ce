"""Lines and picture of a tuning say what was tried, what was not taken and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surefoot.commands.tune import outcome
from surefoot.commands.tune.outcome import outcome_lines, picture, trial_line
from surefoot.commands.tune.search import Tried

START = Tried({"batch.micro": "auto", "compile": "off"}, 1000.0, 2**20)
FAST = Tried({"batch.micro": 8, "compile": "off"}, 1500.0, 2**21)
SLOW = Tried({"batch.micro": 1, "compile": "off"}, 250.0, 2**20, early=True)
WRONG = Tried({"batch.micro": 4, "compile": "off"}, 2000.0, 2**20, failure="the loss of step 1 is off")
LARGE = Tried({"batch.micro": 16, "compile": "off"}, failure="not enough memory")


def test_a_line_for_each():
    lines = [" ".join(trial_line(3, one, START).split()) for one in (START, FAST, SLOW, WRONG, LARGE)]
    assert lines == [
        "3 1,000 tok/s 1.0 MiB the plan's own choices",
        "3 1,500 tok/s +50% 2.0 MiB batch.micro 8",
        "3 250 tok/s -75% 1.0 MiB batch.micro 1, stopped early",
        "3 2,000 tok/s +100% 1.0 MiB batch.micro 4: rejected, the loss of step 1 is off",
        "3 - tok/s - batch.micro 16: not enough memory",
    ]


def test_the_account():
    left_out = [("data.workers", "the config sets it")]
    lines = list(outcome_lines((START, FAST), (), FAST, left_out, held_up=0.4))
    assert lines[0] == "not varied: data.workers, the config sets it"
    assert "40%" in lines[1]
    assert lines[2] == "best: batch.micro 8: 1,500 tokens/s and 2.0 MiB, 1.50 times the plan's own 1,000 and 1.0 MiB"
    assert list(outcome_lines((START,), (), START, [])) == [
        "the plan's own choices are best: nothing is clearly faster than 1,000 tokens/s"
    ]


def test_what_decides_has_lines_of_its_own_under_the_numbers_it_had():
    again = replace(START, rate=600.0), replace(FAST, rate=606.0)
    own, fast, verdict = outcome_lines((START, SLOW, FAST), again, again[0], [])
    assert own.split()[:2] == ["1", "600"]
    assert (fast.split()[0], fast.split()[1], fast.split()[3]) == ("3", "606", "+1%")
    assert "600 tokens/s" in verdict
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
