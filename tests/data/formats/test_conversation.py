"""Results of tools find their calls by id, or by order where the data gives none; what is left open is refused."""

from __future__ import annotations

import pytest

from helpers.faults import gives
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


UNPAIRED = [  # with the numbers of turns and the names that the message gives
    (AB, [{"tool_call_id": "z"}], [3, "'z'", 2]),
    ([(None, "a")], [{"tool_call_id": "z"}], [3, "'z'", 2]),
    (AB, [{"tool_call_id": "x"}, {"tool_call_id": "x"}], ["'x'", 2]),
    (AB, [{"tool_call_id": "x"}, {}], [4]),
    ([("x", "a"), ("x", "b")], [{}], [2]),
    (AB, [{"name": "b"}, {"name": "a"}], [3, "'b'", "'a'"]),
]
NO_TEXT = [(AB, [{"tool_call_id": 7}], [3, "'tool_call_id'"]), ([(7, "a")], [{}], [2, 1, "'id'"])]


@pytest.mark.parametrize(("calls", "results", "named"), [*UNPAIRED, *NO_TEXT])
def test_what_is_refused(calls, results, named):
    with pytest.raises(RowFault) as caught:
        read(calls, results)
    assert [value for value in named if not gives(caught.value.what, value)] == [], caught.value.what


def test_twin_without_the_check_they_would_be_learned(monkeypatch):
    monkeypatch.setattr(turns, "check_results", lambda turns: None)
    for calls, results, _ in UNPAIRED:
        read(calls, results)


def test_other_formats_keep_ids_too():
    calls = '[{"id": "x", "name": "a", "arguments": {}}, {"id": "y", "name": "b", "arguments": {}}]'
    parts = [("human", "q", {}), ("function_call", calls, {}), ("observation", "r", {"tool_call_id": "y"})]
    turns = read_sharegpt(
        {"conversations": [{"from": role, "value": text, **more} for role, text, more in [*parts, ("gpt", "a", {})]]}
    ).turns
    assert pair_results(turns) == [None, None, 1, None]
