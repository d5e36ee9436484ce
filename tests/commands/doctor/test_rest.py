"""No code is passed over in silence: what left no line is in order, or does not apply, and says why."""

from __future__ import annotations

import pytest

from helpers.model_layouts import run_config
from surefoot.commands.doctor.codes import CODES
from surefoot.commands.doctor.findings import caution, ok
from surefoot.commands.doctor.rest import rest

LORA = {"kind": "lora", "rank": 4}


def config(**changes):
    return run_config(**{"model": "base", "adapter": LORA, "data": {"train": "rows.json"}, "output": "out"} | changes)


def values(found):
    return {one.code: one.value for one in found}


def test_every_code_has_a_line_and_none_has_two():
    seen = [ok("DISK", "enough"), caution("PLAN", "a sentence", "a fix")]
    found = rest(config(), seen)
    assert all(one.verdict == "ok" and one.value for one in found)
    assert sorted([one.code for one in found] + ["DISK", "PLAN"]) == sorted(CODES)


def test_the_machine_alone_has_codes_of_the_machine():
    found = rest(None, [ok("HUB", "it answers")])
    assert {one.code for one in found} | {"HUB"} == {name for name, code in CODES.items() if code.group == "machine"}


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({}, "ROW-ZERO-NORM", "does not apply"),
        ({"adapter": {"kind": "dora", "rank": 4}}, "ROW-ZERO-NORM", "none"),
        ({"adapter": None}, "ADAPTER-TARGETS", "does not apply"),
        ({}, "ADAPTER-TARGETS", "all there"),
        ({"stage": "ppo"}, "TOK-STOP", "stage ppo"),
        ({"stage": "ppo"}, "LOSS-FALLING", "stage ppo"),
        ({}, "DATA", "every record was read"),
    ],
)
def test_the_reason(changes, code, words):
    assert words in values(rest(config(**changes), []))[code]
