"""Every bad input of the catalogue: the right exit code, one line with the place and the way out, nothing written."""

from __future__ import annotations

import re

import pytest
from click.testing import Result

from faults.case import Case
from faults.data_cases import CASES as DATA
from faults.model_cases import CASES as MODELS
from faults.place import Place
from faults.run_cases import CASES as RUNS

CASES = [*DATA, *MODELS, *RUNS]
MOST = 700  # characters of an output that a failing test shows


def check(case: Case, result: Result, before: dict[str, str], after: dict[str, str]) -> None:
    seen = result.stderr[-MOST:] or result.stdout[-MOST:]
    assert result.exit_code == case.code, seen
    assert "Traceback" not in result.output, seen
    errors = re.findall(r"^(?:\S.*: )?error: .*$", result.stderr, re.MULTILINE)
    assert len(errors) == (case.faults if case.code not in (0, 75) else 0), seen
    text = "\n".join(errors) or result.output
    missing = [words for words in case.says if words not in text]
    assert not missing, seen
    if not case.writes:
        assert after == before


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_refused(case: Case, place: Place) -> None:
    words = case.prepare(place) or ["train", place.config()]
    before = place.snapshot()
    result = place.call(*words)
    check(case, result, before, place.snapshot())


def test_the_table_is_long_and_names_every_case_once() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= 120


def test_twin_what_is_written_or_said_otherwise_is_noticed(place: Place) -> None:
    case = next(case for case in CASES if case.id == "D3: empty file")
    case.prepare(place)
    before = place.snapshot()
    result = place.call("train", place.config())
    with pytest.raises(AssertionError):
        check(case, result, before, place.snapshot())  # run.yaml is new
