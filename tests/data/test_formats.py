"""Records become conversations, or are refused by row and field; nothing is repaired."""

from __future__ import annotations

import itertools

import pytest

from surefoot.data import formats
from surefoot.data.formats import Turn, convert, recognise, unused_fields
from surefoot.data.rows import Row
from surefoot.errors import InputError


def rows(*values: dict) -> list[Row]:
    return [Row(number, 10 * number, value) for number, value in enumerate(values, start=1)]


def turns(value: dict, layout: str) -> tuple[Turn, ...]:
    return convert(rows(value), layout, "d.json")[0].turns


def fault_of(value: dict, layout: str) -> str:
    with pytest.raises(InputError) as caught:
        turns(value, layout)
    return str(caught.value)


def messages(*pairs: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def test_alpaca():
    record = {"instruction": "Add.", "input": "1 and 2", "output": "3", "system": "Be brief."}
    assert turns(record, "alpaca") == (
        Turn("system", "Be brief."),
        Turn("user", "Add.", "1 and 2"),
        Turn("assistant", "3"),
    )
    assert Turn("user", "Add.", "1 and 2").text == "Add.\n1 and 2"
    for absent in ({}, {"input": None}, {"input": ""}, {"input": " \n"}, {"system": ""}):
        assert turns({"instruction": "Add.", "output": "3", **absent}, "alpaca") == (
            Turn("user", "Add."),
            Turn("assistant", "3"),
        )


def test_messages_and_text():
    record = messages(("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"))
    assert [turn.role for turn in turns(record, "messages")] == ["system", "user", "assistant", "user", "assistant"]
    assert turns(messages(("system", " "), ("user", "u"), ("assistant", "a")), "messages")[0] == Turn("user", "u")
    assert turns({"text": "Once."}, "text") == (Turn("text", "Once."),)


def test_rows_keep_their_place():
    read = convert(rows({"text": "a"}, {"text": "b"}), "text", "d.json")
    assert [(conversation.number, conversation.line) for conversation in read] == [(1, 10), (2, 20)]


@pytest.mark.parametrize(
    ("value", "layout", "message"),
    [
        ({"instruction": "q", "ouput": "a"}, "alpaca", "has no 'output' (it has 'instruction', 'ouput', 'ouput' looks"),
        ({"instruction": "q", "output": None}, "alpaca", "has null in 'output', where text belongs"),
        ({"instruction": "q", "output": 3}, "alpaca", "has a number in 'output', where text belongs"),
        ({"instruction": "q", "output": True}, "alpaca", "has true or false in 'output', where text belongs"),
        ({"instruction": ["q"], "output": "a"}, "alpaca", "has a list in 'instruction', where text belongs"),
        ({"instruction": "q", "output": ""}, "alpaca", "has an empty 'output'"),
        ({"instruction": "q", "output": " \n"}, "alpaca", "has an empty 'output'"),
        ({"instruction": "", "input": " ", "output": "a"}, "alpaca", "'instruction' and 'input' are both empty"),
        ({"instruction": "q", "input": 5, "output": "a"}, "alpaca", "has a number in 'input', where text belongs"),
        ({"text": ""}, "text", "has an empty 'text'"),
        ({"messages": []}, "messages", "'messages' is an empty list, not a list of turns"),
        ({"messages": "u"}, "messages", "'messages' is text, not a list of turns"),
        ({"messages": ["u"]}, "messages", "turn 1 is text, not an object with role and content"),
        ({"messages": [{"role": "user"}]}, "messages", "turn 1 has no 'content'"),
        (messages(("user", "u"), ("assistant", "")), "messages", "turn 2 has an empty 'content'"),
        (messages(("user", " "), ("assistant", "a")), "messages", "turn 1 has an empty 'content'"),
        (messages(("User", "u")), "messages", "turn 1 has the unknown role 'User'; did you mean 'user'?"),
        (messages(("tool", "u")), "messages", "turn 1 has the unknown role 'tool'; known roles: 'system', 'user'"),
        (messages(("user", "u")), "messages", "the last turn is user: there is no answer to learn"),
        (messages(("system", "s")), "messages", "the last turn is system: there is no answer to learn"),
        (messages(("user", "u"), ("user", "v")), "messages", "turn 2 is user, but assistant was expected"),
        (messages(("user", "u"), ("system", "v")), "messages", "turn 2 is system, but assistant was expected"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages", "turn 1 has a list in 'content'"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}, "messages", "turn 1 has tool calls"),
    ],
)  # fmt: skip
def test_faults_name_file_line_row_and_field(value, layout, message):
    assert fault_of(value, layout).startswith(f"d.json:10: row 1: {message}")


def test_only_these_orders_of_roles_pass():
    """All sequences of up to five roles against the rule written as a pattern."""
    for length in range(1, 6):
        for roles in itertools.product(("system", "user", "assistant"), repeat=length):
            rest = roles[1:] if roles[0] == "system" else roles
            fits = len(rest) > 0 and len(rest) % 2 == 0 and all(
                role == ("user", "assistant")[place % 2] for place, role in enumerate(rest)
            )  # fmt: skip
            record = messages(*((role, "x") for role in roles))
            if fits:
                assert tuple(turn.role for turn in turns(record, "messages")) == roles
            else:
                assert "row 1: " in fault_of(record, "messages")


def test_all_faulty_rows_are_counted_and_the_first_are_listed():
    with pytest.raises(InputError) as caught:
        convert(rows(*({"text": ""} if number % 2 else {"text": "x"} for number in range(40))), "text", "d.json")
    assert len(caught.value.faults) == 9
    assert str(caught.value.faults[0]).startswith("d.json:20: row 2: ")
    assert str(caught.value.faults[-1]) == "d.json: 12 more faulty rows were seen"


@pytest.mark.parametrize(
    ("columns", "layout"),
    [
        (("instruction", "input", "output"), "alpaca"),
        (("output", "instruction"), "alpaca"),
        (("messages", "text"), "messages"),
        (("text",), "text"),
    ],
)
def test_recognise_says_what_it_saw(columns, layout):
    found, reason = recognise(rows(dict.fromkeys(columns, "x")), "d.json")
    assert found == layout
    assert "the first record has" in reason


def test_unrecognised_columns_and_their_nearest_name():
    with pytest.raises(InputError) as caught:
        recognise(rows({"instruction": "q", "outputs": "a"}), "d.json")
    message = str(caught.value)
    assert message.startswith("d.json:10: row 1 has no layout that surefoot knows: it has 'instruction', 'outputs'")
    assert "('outputs' looks like 'output')" in message
    assert "alpaca: 'instruction', 'output'" in message


def test_unused_fields_are_told():
    assert unused_fields(rows({"instruction": "q", "output": "a", "answer": "b"}, {"history": []}), "alpaca") == (
        "answer",
        "history",
    )
    record = {"messages": [{"role": "user", "content": "u", "weight": 0}], "id": 1}
    assert unused_fields(rows(record), "messages") == ("id", "messages[].weight")


def test_twin_without_the_order_check_accepts_two_prompts_in_a_row(monkeypatch):
    monkeypatch.setattr(formats, "_check_order", lambda turns: None)
    assert len(turns(messages(("user", "u"), ("user", "v")), "messages")) == 2
