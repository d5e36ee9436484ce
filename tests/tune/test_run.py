"""A trial that compiles may not take a search hostage."""

from __future__ import annotations

from typing import Any

import pytest

from plans import run_plan
from surefoot.tune import run as module
from surefoot.tune.attempt import Answer
from surefoot.tune.gate import Numbers

LIMIT, COMPILING = 60.0, 40.0  # seconds


@pytest.mark.parametrize(("settings", "limit"), [({"compile": "default"}, COMPILING), ({"compile": "off"}, LIMIT)])
def test_what_compiles_has_a_limit_of_its_own(monkeypatch, settings, limit):
    asked: list[Any] = []

    def attempt(plain, *, steps, rounds, limit):
        asked.append(limit)
        return Answer(None, f"not done after {limit:.0f} s")

    monkeypatch.setattr(module, "attempt", attempt)
    monkeypatch.setattr(module._Trials, "_refused", lambda self, plain: "")
    lengths: Any = None  # which only the planner reads
    trials = module._Trials(
        {},
        run_plan(trainable=1, parameters=2),
        lengths,
        Numbers([1.0], [1.0]),
        steps=2,
        limit=LIMIT,
        compiling=COMPILING,
    )
    tried = trials.look(settings)
    assert asked == [limit]
    assert tried.failure == f"not done after {limit:.0f} s"
