"""Lines and picture of a tuning say what was tried, what was not taken and why."""

import re
from dataclasses import replace

import pytest

from helpers.faults import gives
from surefoot.commands.tune import outcome
from surefoot.commands.tune.outcome import outcome_lines, picture, trial_line
from surefoot.commands.tune.search import Tried

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
