"""Codes, exit codes and the JSON that programs read."""

import json
import re

import pytest

from helpers.faults import gives
from surefoot.commands.doctor.command import advice
from surefoot.commands.doctor.findings import CODES, Examination, caution, fault, ok, refusals, to_json, unknown
from surefoot.system.errors import NO_MEMORY, EnvironmentFault, Fault, InputError


def exam(*lines):
    return Examination(lines, {"machine": {}})


def test_exit_codes():
    full, bad = fault("DISK", "full", "make room"), fault("DATA", "bad", "mend it")
    assert [exam(*lines).exit_code for lines in ((), (ok("DISK", "much"),), (caution("THREADS", "8", "4"),))] == [0] * 3
    assert (exam(full).exit_code, exam(full, bad).exit_code) == (3, 2)


def test_a_finding_is_what_is_not_ok_faults_first():
    lines = (ok("DISK", "much"), caution("THREADS", "8", "4"), fault("DATA", "bad", "mend it"))
    assert [one.code for one in exam(*lines).findings] == ["DATA", "THREADS"]


def test_what_nobody_could_look_at_is_no_finding_and_not_in_order():
    found = exam(unknown("FAST-PATH", "full"))
    assert (found.findings, found.exit_code) == ((), 0)
    (line,) = to_json(found)["checks"]
    assert line["verdict"] == "unknown"
    assert gives(line["value"], "full")


def test_a_code_without_a_row_is_a_mistake():
    with pytest.raises(KeyError):
        ok("NEW", "")


def test_json_is_what_programs_were_promised():
    line = caution("THREADS", "8 threads", "set OMP_NUM_THREADS=4", where="here", gain=2.3456)
    assert json.loads(json.dumps(to_json(exam(ok("DISK", "much"), line)))) == {
        "format": 1,
        "exit_code": 0,
        "findings": ["THREADS"],
        "checks": [
            {
                "code": "DISK",
                "verdict": "ok",
                "where": "",
                "value": "much",
                "limit": CODES["DISK"].limit,
                "fix": "",
                "gain": None,
            },
            {
                "code": "THREADS",
                "verdict": "caution",
                "where": "here",
                "value": "8 threads",
                "limit": CODES["THREADS"].limit,
                "fix": "set OMP_NUM_THREADS=4",
                "gain": 2.35,
            },
        ],
        "facts": {"machine": {}},
    }


@pytest.mark.parametrize(
    ("error", "code", "exit_code"),
    [
        (InputError(Fault("adapter.targets", "matches no module", "name some")), "ADAPTER-TARGETS", 2),
        (InputError(Fault("precision.base", "x", "y")), "DTYPE-CONFLICT", 2),
        (InputError(Fault("data.json:3", "x", "y", "SF-LABEL-PAD")), "TOK-PAD", 2),
        (InputError(Fault("precision.base", "x", "y", "SF-LABEL-STOP")), "TOK-STOP", 2),
        (InputError(Fault("data.max_length", "no label is left", "raise it")), "LABEL-NONE", 2),
        (InputError(Fault("model", "x", "y", NO_MEMORY)), "MEM-OVERSUBSCRIBED", 2),
        (InputError(Fault("model.layers.0.up_proj", "x", "y")), "ROW-ZERO-NORM", 2),
        (InputError(Fault("optim.lr", "x", "choose another tokenizer.pad")), "CONFIG", 2),  # words decide nothing
        (EnvironmentFault(Fault("org/name", "the hub cannot be reached", "y")), "ENVIRONMENT", 3),
        (EnvironmentFault(Fault("attention", "planned flash", "y")), "ATTN-KERNEL", 3),
    ],
)
def test_refusals_by_their_code_or_place(error, code, exit_code):
    (line,) = refusals(error, "CONFIG", ["model.layers.0.up_proj"])
    assert (line.code, line.exit_code, line.verdict) == (code, exit_code, "fault")
    assert line.fix == error.faults[0].fix


def test_all_faults_of_a_refusal_are_said():
    two = InputError([Fault("precision.base", "x", "y"), Fault("optim.lr", "z", "")])
    assert [line.code for line in refusals(two, "CONFIG")] == ["DTYPE-CONFLICT", "CONFIG"]


@pytest.mark.parametrize(("gain", "shown"), [(None, []), (2.345, ["2.3"]), (213.4, ["213"])])
def test_advice_has_the_gain_where_it_was_measured(gain, shown):
    line, total = [text for text, _ in advice(exam(caution("THREADS", "8", "do", gain=gain)))]
    assert re.findall(r"[\d.]+", line) == ["8", *shown]
    assert re.findall(r"\d+", total) == ["0", "1"]  # faults, cautions


def test_advice_says_what_is_wrong_and_where():
    found = exam(caution("DATA-AUDIT", "copies", "look", where="data.json"), fault("CONFIG", "both", ""))
    assert [text for text, _ in advice(found)][:2] == ["CONFIG: both", "DATA-AUDIT: data.json: copies; look"]


def test_nothing_found():
    ((text, _),) = advice(exam(ok("DISK", "much")))
    assert re.findall(r"\d+", text) == ["1"]  # checks


@pytest.mark.parametrize(
    ("fix", "told"),
    [
        ("see `surefoot data`", "see `surefoot data 'my run.yaml' seed=1`"),
        ("`surefoot plan` shows all", "`surefoot plan 'my run.yaml' seed=1` shows all"),
        ("set data.packing: off", "set data.packing: off"),
    ],
)
def test_commands_of_a_fix_can_be_pasted(fix, told):
    assert caution("PLAN", "x", fix).with_config(["my run.yaml", "seed=1"]).fix == told
