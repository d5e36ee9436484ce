"""Nothing that comes with a model, data or a config runs, reaches outside its folder, or keeps the command for ever."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from jinja2 import Environment

from faults.case import Case
from faults.hostile_cases import CASES, Payload
from faults.place import Place
from faults.test_bad_inputs import check
from surefoot.data.chat import sandbox


def left(place: Place) -> list[Path]:
    """What ran or escaped. Above the folder only what lies beside it: the folders of all other tests are there too."""
    seen = [*place.folder.parent.iterdir(), *place.folder.rglob("*")]
    return [path for path in seen if path.name in ("marker", "escaped", "escaped.json")]


def test_there_are_thirty() -> None:
    assert len({case.id for case in CASES}) == len(CASES) >= 30


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_runs_and_nothing_escapes(case: Case, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "STEPS", 50_000)  # the same, sooner
    words = case.prepare(place) or ["train", place.config()]
    before = place.snapshot()
    result = place.call(*words)
    check(case, result, before, place.snapshot())
    assert left(place) == []


def test_twin_opened_by_a_plain_library_they_do_run(place: Place) -> None:
    pickle.loads(pickle.dumps(Payload(place.folder / "marker")))
    assert left(place) == [place.folder / "marker"]
    assert "os" in Environment().from_string("{{ lipsum.__globals__['os'] }}").render()
