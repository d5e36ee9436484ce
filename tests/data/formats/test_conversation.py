"""Results of tools find their calls by id, or by order where the data gives none; what is left open is refused."""

from __future__ import annotations

import re

import pytest

from surefoot.data.formats import RowFault, Turn
from surefoot.data.formats import conversation as turns
from surefoot.data.formats.conversation import pair_results
from surefoot.data.formats.supervised import read_messages, read_sharegpt


def record(calls, results):
    """calls: (id, name); results: fields of each."""
    made = [
        {"function": {"name": name, "arguments": {}}} | ({"id": own} if own is not None else {}) for own, name in calls
    ]
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": None, "tool_calls": made},
            *({"role": "tool", "content": "r", **fields} for fields in results),
            {"role": "assistant", "content": "a"},
        ]
    }


def read(calls, results) -> tuple[Turn, ...]:
    return read_messages(record(calls, results)).turns


AB = [("x", "a"), ("y", "b")]


@pytest.mark.parametrize(
    ("calls", "results", "pairs"),
    [
        (AB, [{"tool_call_id": "y"}, {"tool_call_id": "x"}], [1, 0]),
        (AB, [{"tool_call_id": "y", "name": "any"}], [1]),
        (AB, [{}, {}], [0, 1]),
        ([(None, "a"), (None, "b")], [{"name": "a"}, {"name": "b"}], [0, 1]),
        ([(None, "a")], [{}, {}], [0, None]),
    ],
)
def test_pairs(calls, results, pairs):
    assert pair_results(read(calls, results)) == [None, None, *pairs, None]


REFUSED = [
    (AB, [{"tool_call_id": "z"}], "turn 3 is the result of a call 'z', which turn 2 does not make"),
    ([(None, "a")], [{"tool_call_id": "z"}], "turn 3 is the result of a call 'z', which turn 2 does not make"),
    (AB, [{"tool_call_id": "x"}, {"tool_call_id": "x"}], "the call 'x' of turn 2 has two results"),
    (AB, [{"tool_call_id": "x"}, {}], "turn 4 names no call, but another result of the same answer does"),
    ([("x", "a"), ("x", "b")], [{}], "turn 2 has two calls with the same id"),
    (AB, [{"name": "b"}, {"name": "a"}], "turn 3 is a result of 'b', but the call at its position is to 'a'"),
    (AB, [{"tool_call_id": 7}], "turn 3 has a number in 'tool_call_id', where text is required"),
    ([(7, "a")], [{}], "turn 2 call 1 has a number in 'id', where text is required"),
]


@pytest.mark.parametrize(("calls", "results", "says"), REFUSED)
def test_what_is_refused(calls, results, says):
    with pytest.raises(RowFault, match=re.escape(says)):
        read(calls, results)


def test_twin_without_the_check_they_would_be_learned(monkeypatch):
    monkeypatch.setattr(turns, "check_results", lambda turns: None)
    for calls, results, says in REFUSED:
        if "where text is required" not in says:
            read(calls, results)


def test_other_formats_keep_ids_too():
    calls = '[{"id": "x", "name": "a", "arguments": {}}, {"id": "y", "name": "b", "arguments": {}}]'
    parts = [("human", "q", {}), ("function_call", calls, {}), ("observation", "r", {"tool_call_id": "y"})]
    turns = read_sharegpt(
        {"conversations": [{"from": role, "value": text, **more} for role, text, more in [*parts, ("gpt", "a", {})]]}
    ).turns
    assert pair_results(turns) == [None, None, 1, None]
