"""Twins of the helper: what differs in code, place, number of faults or a value is not the fault that was expected."""

from contextlib import nullcontext

import pytest

from helpers.faults import gives, prints_fault, raises_fault, refused_settings
from surefoot.system.errors import Fault, InputError

ROW = Fault("d.json:13", "row 3 has 1,024 tokens and p1.bias", "raise data.max_length to 1024", code="SF-DATA-ROW")
EMPTY = Fault("data.eval", "leaves 0 rows", code="SF-DATA-EMPTY")


@pytest.mark.parametrize(
    ("raised", "expected", "more"),
    [
        ([ROW], ("SF-DATA-ROW", "d.json:13"), {}),
        ([ROW], ("SF-DATA-ROW", "d.json:13", 3, "1,024", "p1.bias"), {"remedy": ["data.max_length", 1024]}),
        ([ROW, EMPTY], ("SF-DATA-ROW", "d.json:13"), {"also": [("SF-DATA-EMPTY", "data.eval", 0)]}),
    ],
)
def test_the_fault_that_was_expected(raised, expected, more):
    with raises_fault(*expected, **more) as caught:
        raise InputError(raised)
    assert list(caught.value.faults) == raised


@pytest.mark.parametrize(
    ("raised", "expected", "more"),
    [
        pytest.param([ROW], ("SF-DATA-FILE", "d.json:13"), {}, id="code"),
        pytest.param([ROW], ("SF-DATA", "d.json:13"), {}, id="part of a code"),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:1"), {}, id="begin of a place"),
        pytest.param([ROW], ("SF-DATA-ROW", "json:13"), {}, id="end of a place"),
        pytest.param([ROW], ("SF-DATA-ROW", ""), {}, id="no place"),
        pytest.param([ROW, EMPTY], ("SF-DATA-ROW", "d.json:13"), {}, id="one too many"),
        pytest.param(
            [EMPTY, ROW], ("SF-DATA-ROW", "d.json:13"), {"also": [("SF-DATA-EMPTY", "data.eval")]}, id="order"
        ),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:13"), {"also": [("SF-DATA-EMPTY", "data.eval")]}, id="one too few"),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:13", 4), {}, id="value"),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:13", 1), {}, id="begin of a number"),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:13", "bias"), {}, id="part of a name"),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:13", "data.max_length"), {}, id="value of the remedy alone"),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:13"), {"remedy": [3]}, id="value of the message alone"),
        pytest.param([ROW], ("SF-DATA-ROW", "d.json:13", "row 3 has"), {}, id="a sentence"),
        pytest.param([Fault("a", "b\nc", code="SF-PPO")], ("SF-PPO", "a"), {}, id="two lines"),
        pytest.param(
            [ROW, EMPTY], ("SF-DATA-ROW", "d.json:13"), {"also": [("SF-DATA-EMPTY", "data.eval", 1)]}, id="second value"
        ),
    ],
)
def test_twin_another_fault(raised, expected, more):
    with pytest.raises(AssertionError), raises_fault(*expected, **more):
        raise InputError(raised)


def test_twin_no_fault():
    with pytest.raises(pytest.fail.Exception), raises_fault("SF-DATA-ROW", "d.json:13"), nullcontext():
        pass


def test_twin_an_error_that_is_not_ours_stays_what_it_is():
    with pytest.raises(ValueError, match=r"^x$"), raises_fault("SF-DATA-ROW", "d.json:13"):
        raise ValueError("x")


def test_a_fault_that_was_printed():
    line = "error: d.json:13: row 3 has no answer [SF-DATA-ROW]"
    assert prints_fault(f"reading\n{line}\n", "SF-DATA-ROW", "d.json:13", 3)
    assert not prints_fault(line, "SF-DATA-FILE", "d.json:13")
    assert not prints_fault(line, "SF-DATA-ROW", "d.json")
    assert not prints_fault(line, "SF-DATA-ROW", "d.json:13", 13)
    for text in (f"{line}\n{line}", ""):
        with pytest.raises(ValueError, match="unpack"):
            prints_fault(text, "SF-DATA-ROW", "d.json:13")


YAML = "stage: sft\nlora_rank: x\n"


@pytest.mark.parametrize(
    ("where", "text", "found"),
    [
        ("run.yaml:2:1", YAML, True),
        ("run.yaml:1:1", YAML, False),
        ("run.yaml:2:2", YAML, False),
        ("run.yaml:2", YAML, False),
        ("", YAML, False),  # it stands there, so it has a place
        ("", "stage: sft", True),
        ("run.json:1:2", '{"lora_rank": 8}', True),
        ("run.json:1:2", '{"lora_rank_": 8}', False),
        ("--lora_rank", "", True),
    ],
)
def test_a_refused_setting_is_named_at_its_place(where, text, found):
    what = "is no number" if where.startswith("--") else "lora_rank: is no number"

    def refuse():
        raise InputError(Fault(where, what, code="SF-TRANSLATE-SETTING"))

    if found:
        assert refused_settings(refuse, text=text) == ["lora_rank"]
    else:
        with pytest.raises(AssertionError):
            refused_settings(refuse, text=text)


@pytest.mark.parametrize(
    ("text", "value", "found"),
    [
        ("at 3.", 3, True),
        ("3.5 of 13", 3, False),
        ("3,000", 3, False),
        ("1,003", 3, False),
        ("-3", 3, True),
        ("'q_prj'", "q_prj", True),
        ("layers.0.q_prj", "q_prj", False),
        ("[329, 32] in the file", [329, 32], True),
        ("restore /a/b.", "/a/b", True),
        ("/a/b/c", "/a/b", False),
        ("/a/b/c", "b/c", False),
    ],
)
def test_values_are_whole(text, value, found):
    assert gives(text, value) == found
