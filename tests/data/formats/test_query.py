"""Records of ms-swift: query and response, and pairs with a rejected response."""

from __future__ import annotations

from typing import Any

import pytest

from helpers.converted_records import convert, rows
from helpers.faults import raises_fault
from surefoot.data.formats import Turn, recognize, scan_format

ASKED = {"role": "user", "content": "Name a tree."}
GOOD = {"role": "assistant", "content": "Larch."}
BAD = {"role": "assistant", "content": "Trout."}
TURNS = ((Turn("user", "Name a tree.", learned=False), Turn("assistant", "Larch.")),
         (Turn("user", "Name a tree.", learned=False), Turn("assistant", "Trout.")))  # fmt: skip


def pair(record: dict[str, Any]) -> tuple[tuple[Turn, ...], ...]:
    layout = scan_format("pairs", "auto", rows(record), "d.jsonl").layout
    return tuple(one.turns for one in convert(rows(record), layout, "d.jsonl"))


def test_a_query_with_system_and_history():
    record = {"query": "And a fish?", "response": "Trout.", "history": [["Name a tree.", "Larch."]], "system": "Short."}
    assert recognize(rows(record)[0], "d.jsonl")[0] == "query-response"
    turns = convert(rows(record), "query-response", "d.jsonl")[0].turns
    assert turns == (
        Turn("system", "Short."),
        Turn("user", "Name a tree."),
        Turn("assistant", "Larch."),
        Turn("user", "And a fish?"),
        Turn("assistant", "Trout."),
    )
    for name in ("query", "response"):  # twin
        with raises_fault(where="d.jsonl:10", code="SF-DATA-ROW"):
            convert(rows(record | {name: ""}), "query-response", "d.jsonl")


@pytest.mark.parametrize(
    "record",
    [
        {"query": "Name a tree.", "response": "Larch.", "rejected_response": "Trout."},
        {"messages": [ASKED, GOOD], "rejected_response": "Trout."},
        {"messages": [ASKED, GOOD], "rejected_response": [BAD]},
        {"messages": [ASKED, GOOD], "rejected_messages": [ASKED, BAD]},
        {"messages": [ASKED, GOOD], "rejected_response": None, "rejected_messages": [ASKED, BAD]},
    ],
)
def test_pairs_with_a_rejected_response(record):
    assert pair(record) == TURNS


def test_an_earlier_answer_belongs_to_both():
    first = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    better, worse = pair({"messages": [*first, ASKED, GOOD], "rejected_response": "Trout."})
    assert better[:3] == worse[:3]
    assert not any(turn.learned for turn in better[:3])


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [GOOD], "rejected_response": "Trout."},
        {"messages": [ASKED, GOOD], "rejected_response": 3},
        {"query": "Name a tree.", "rejected_response": "Trout."},
        {"messages": [ASKED, GOOD], "rejected_response": "Trout.", "images": ["a.png"], "rejected_images": ["b.png"]},
    ],
)
def test_a_pair_that_is_none_is_one_fault(record):
    with raises_fault(where="d.jsonl:10", code="SF-DATA-ROW"):
        pair(record)


def test_a_query_is_a_prompt_and_may_be_judged():
    asked = convert(rows({"query": "Name a tree.", "solution": "larch"}), "prompts", "d.jsonl")[0]
    assert asked.turns == (Turn("user", "Name a tree."),)
    judged = convert(rows({"query": "Name a tree.", "response": "Trout.", "label": False}), "judged", "d.jsonl")[0]
    assert (judged.turns[-1], judged.good) == (Turn("assistant", "Trout.", learned=True), False)
