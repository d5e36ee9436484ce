"""Roles, tools and calls of the sharegpt and messages formats end as the same conversation."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from helpers.converted_records import convert
from helpers.faults import raises_fault
from surefoot.data.formats import ToolCall, Turn, retag
from surefoot.data.formats import supervised as sharegpt_module
from surefoot.data.formats.supervised import read_messages
from surefoot.data.sources.records import Row

SHARED = Path(__file__).parents[4] / "shared/data/instruct"
CALL = {"name": "add", "arguments": {"a": 1, "b": [2, None]}}
TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
WRAPPED = {"type": "function", "function": TOOL}


def rows(*values: dict) -> list[Row]:
    return [Row(number, number, value) for number, value in enumerate(values, start=1)]


def sharegpt(*pairs: tuple[str, object], **more) -> dict:
    return {"conversations": [{"from": role, "value": value} for role, value in pairs], **more}


def one(value: dict, layout: str = "sharegpt"):
    return convert(rows(value), layout, "d.json")[0]


DIALOGUE = sharegpt(
    ("human", "Add."),
    ("function_call", json.dumps([CALL, CALL])),
    ("observation", "3"),
    ("observation", ""),
    ("gpt", "It is 3."),
    tools=json.dumps([TOOL]),
)
MESSAGES = {
    "messages": [
        {"role": "user", "content": "Add."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}},
                {"id": "2", **CALL},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "assistant", "content": "It is 3.", "tool_calls": None},
    ],
    "tools": [WRAPPED],
}


def test_both_formats_become_the_same_conversation():
    call = ToolCall("add", {"a": 1, "b": [2, None]})
    assert one(DIALOGUE).turns == (
        Turn("user", "Add."),
        Turn("assistant", "", calls=(call, call)),
        Turn("tool", "3"),
        Turn("tool", ""),
        Turn("assistant", "It is 3."),
    )
    assert one(DIALOGUE).tools == (WRAPPED,)
    called, named = ToolCall("add", call.arguments, "1"), ToolCall("add", call.arguments, "2")
    user, _, first, second, answer = one(DIALOGUE).turns
    turns = (
        user,
        Turn("assistant", "", calls=(called, named)),
        replace(first, call="1"),
        replace(second, call="2"),
        answer,
    )
    assert replace(one(DIALOGUE), turns=turns) == one(MESSAGES, "messages")


@pytest.mark.parametrize("role", ["gpt", "assistant", "chatgpt", "bing", "bard", "model"])
def test_usual_names_of_roles(role):
    assert one(sharegpt(("user", "q"), (role, "a"))).turns == (Turn("user", "q"), Turn("assistant", "a"))
    called = one(sharegpt(("human", "q"), ("tool_call", json.dumps(CALL)), ("tool", "r"), (role, "a"))).turns
    assert [turn.role for turn in called] == ["user", "assistant", "tool", "assistant"]


def test_system_turn_or_field():
    pairs = (("human", "q"), ("gpt", "a"))
    for record in (sharegpt(("system", "s"), *pairs), sharegpt(*pairs, system="s")):
        assert one(record).turns[0] == Turn("system", "s")
    for record in (sharegpt(("system", " "), *pairs), sharegpt(*pairs, system=None), sharegpt(*pairs)):
        assert one(record).turns[0] == Turn("user", "q")
    with raises_fault("SF-DATA-ROW", "d.json:1", 1, "'system'"):
        one(sharegpt(("system", "s"), *pairs, system="t"), "sharegpt")


@pytest.mark.parametrize("tools", [None, "", " ", "[]", []])
def test_no_tools(tools):
    assert one(sharegpt(("human", "q"), ("gpt", "a"), tools=tools)).tools == ()


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (sharegpt(("human", "q"), ("function_call", "add(1)")), (2, "value")),
        (sharegpt(("human", "q"), ("function_call", "[]")), (2, "value")),
        (sharegpt(("human", "q"), ("function_call", '"x"')), (2, 1)),
        (sharegpt(("human", "q"), ("function_call", '{"name": "f"}')), (2, 1, "arguments")),
        (sharegpt(("human", "q"), ("function_call", '{"arguments": {}}')), (2, 1, "name")),
        (sharegpt(("human", "q"), ("function_call", '{"name": "f", "arguments": [1]}')), (2, 1)),
        (sharegpt(("human", "q"), ("function_call", '{"name": "f", "name": "g"}')), (2, "value")),
        (sharegpt(("human", "q"), ("gpt", "a"), tools="{"), ("tools",)),
        (sharegpt(("human", "q"), ("gpt", "a"), tools="{}"), ("tools",)),
        (sharegpt(("human", "q"), ("gpt", "a"), tools=[{"type": "function"}]), ("tool", 1, "name")),
        (sharegpt(("human", "q"), ("gpt", "a"), tools=["add"]), ("tool", 1)),
        (sharegpt(("human", "q"), ("gtp", "a")), (2, "gtp", "gpt")),
        (sharegpt(("human", "q"), ("gpt", "a"), ("human", "r")), ("user",)),
        (sharegpt(("human", "q"), ("human", "r"), ("gpt", "a")), (2, "user", "assistant")),
        (sharegpt(("gpt", "a"), ("human", "q"), ("gpt", "b")), (1, "assistant", "user")),
        (sharegpt(("human", "q"), ("observation", "r"), ("gpt", "b")), (2, "tool", "assistant")),
        (sharegpt(("human", ["q"]), ("gpt", "b")), (1, "value")),
    ],
)  # fmt: skip
def test_faults_name_turn_and_field(record, said):
    with raises_fault("SF-DATA-ROW", "d.json:1", 1, *said):
        one(record, "sharegpt")


def test_calls_are_the_assistants():
    record = {
        "messages": [{"role": "user", "content": "q", "tool_calls": [CALL]}, {"role": "assistant", "content": "a"}]
    }
    with raises_fault("SF-DATA-ROW", "d.json:1", 1, "user"):
        one(record, "messages")
    silent = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": []}]}
    with raises_fault("SF-DATA-ROW", "d.json:1", 1, 2, "'content'"):
        one(silent, "messages")


def test_tags_are_a_renaming():
    tags = {
        "role_tag": "speaker",
        "content_tag": "says",
        "user_tag": "me",
        "assistant_tag": "you",
        "function_tag": "do",
    }
    said = [("me", "q"), ("do", json.dumps(CALL)), ("observation", "r"), ("you", "a")]
    record = {"conversations": [{"speaker": role, "says": value, "id": 1} for role, value in said], "tools": "[]"}
    plain = sharegpt(("human", "q"), ("function_call", json.dumps(CALL)), ("observation", "r"), ("gpt", "a"))
    (row,) = retag(rows(record), tags)
    assert convert([row], "sharegpt", "d.json")[0] == one(plain)
    assert row.value["conversations"][0] == {"from": "human", "value": "q", "id": 1}
    assert record["conversations"][0]["speaker"] == "me"  # the record itself is left alone
    assert list(retag(rows(record), {})) == rows(record)
    assert next(retag(rows({"conversations": ["x", 3]}), tags)).value == {
        "conversations": ["x", 3]
    }  # for the format to judge


@pytest.mark.skipif(not SHARED.exists(), reason="the shared sample data are not here")
def test_real_data():
    values = json.loads((SHARED / "sharegpt_multiturn_200.json").read_text(encoding="utf-8"))
    found = convert(rows(*values), "sharegpt", "d.json")
    assert len(found) == 200
    names = Counter(turn["from"] for value in values for turn in value["conversations"])
    calls = [call for one in found for turn in one.turns for call in turn.calls]
    roles = Counter(turn.role for one in found for turn in one.turns)
    assert len(calls) == names["function_call"] > 100
    assert roles == {"user": names["human"], "tool": names["observation"], "assistant": names["gpt"] + len(calls)}
    tags = json.loads((SHARED / "dataset_info.json").read_text(encoding="utf-8"))["kto_en_demo"]["tags"]
    dialogues = json.loads((SHARED / "kto_en_demo.json").read_text(encoding="utf-8"))
    as_sharegpt = convert(retag(rows(*dialogues), tags), "sharegpt", "d.json")
    assert as_sharegpt == convert(rows(*dialogues), "messages", "d.json")


def test_twin_with_an_answer_in_place_of_a_call(monkeypatch):
    monkeypatch.setitem(sharegpt_module._SHAREGPT_ROLES, "function_call", "assistant")
    with pytest.raises(AssertionError):
        test_both_formats_become_the_same_conversation()


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_thoughts_in_a_field_of_their_own(name):
    answer = {"role": "assistant", "content": "Heron.", name: "A bird…"}
    question = {"role": "user", "content": "Name a bird.", name: "not read"}
    asked, said = read_messages({"messages": [question, answer]}).turns
    assert (said.content, said.thought) == ("Heron.", "A bird…")
    assert asked.thought == ""
    assert read_messages({"messages": [question, answer | {name: None}]}).turns[1].thought == ""  # a table's blank
