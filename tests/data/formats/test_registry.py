"""Records become conversations, or are refused by row and field; nothing is repaired."""

from __future__ import annotations

import itertools
import re

import pytest

from helpers.converted_records import convert, converted, rows
from helpers.faults import raises_fault
from surefoot.data.formats import Conversation, Turn, recognise, scan_format
from surefoot.data.formats import conversation as fields
from surefoot.data.formats import conversation as turns_module
from surefoot.data.formats.reader import reader_with
from surefoot.data.formats.registry import unused_in
from surefoot.system.errors import InputError


def conversation(value: dict, layout: str) -> Conversation:
    return convert(rows(value), layout, "d.json")[0]


def turns(value: dict, layout: str) -> tuple[Turn, ...]:
    return conversation(value, layout).turns


def fault_of(value: dict, layout: str) -> str:
    with pytest.raises(InputError) as caught:
        turns(value, layout)
    return str(caught.value)


def messages(*pairs: tuple[str, str]) -> dict:
    return {"messages": [{"role": role, "content": content} for role, content in pairs]}


def parts(*values) -> dict:
    return {"messages": [{"role": "user", "content": list(values)}, {"role": "assistant", "content": "a"}]}


def marked(marks: dict) -> dict:
    return {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a", **marks}]}


def alpaca(**more) -> dict:
    return {"instruction": "q", "output": "a", **more}


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
        ({"instruction": "q", "output": None}, "alpaca", "has null in 'output', where text is required"),
        ({"instruction": "q", "output": 3}, "alpaca", "has a number in 'output', where text is required"),
        ({"instruction": "q", "output": True}, "alpaca", "has true or false in 'output', where text is required"),
        ({"instruction": ["q"], "output": "a"}, "alpaca", "has a list in 'instruction', where text is required"),
        ({"instruction": "q", "output": ""}, "alpaca", "has an empty 'output'"),
        ({"instruction": "q", "output": " \n"}, "alpaca", "has an empty 'output'"),
        ({"instruction": "", "input": " ", "output": "a"}, "alpaca", "'instruction' and 'input' are both empty"),
        ({"instruction": "q", "input": 5, "output": "a"}, "alpaca", "has a number in 'input', where text is required"),
        ({"text": ""}, "text", "has an empty 'text'"),
        ({"messages": []}, "messages", "'messages' is an empty list, not a list of turns"),
        ({"messages": "u"}, "messages", "'messages' is text, not a list of turns"),
        ({"messages": ["u"]}, "messages", "turn 1 is text, not an object with role and content"),
        ({"messages": [{"role": "user"}]}, "messages", "turn 1 has no 'content'"),
        (messages(("user", "u"), ("assistant", "")), "messages", "turn 2 has an empty 'content'"),
        (messages(("user", " "), ("assistant", "a")), "messages", "turn 1 has an empty 'content'"),
        (messages(("User", "u")), "messages", "turn 1 has the unknown role 'User'; did you mean 'user'?"),
        (messages(("function", "u")), "messages", "turn 1 has the unknown role 'function'; known roles: 'sys"),
        (messages(("tool", "u")), "messages", "turn 1 is tool, but user was expected"),
        (messages(("user", "u")), "messages", "the last turn is user: there is no answer to learn"),
        (messages(("system", "s")), "messages", "the last turn is system: there is no answer to learn"),
        (messages(("user", "u"), ("user", "v")), "messages", "turn 2 is user, but assistant was expected"),
        (messages(("user", "u"), ("system", "v")), "messages", "turn 2 is system, but assistant was expected"),
        (messages(("user", "u"), ("tool", "v")), "messages", "turn 2 is tool, but assistant was expected"),
        (messages(("user", "u"), ("assistant", "a"), ("assistant", "b")), "messages", "turn 3 is assistant, but user"),
        (parts({"type": "text"}), "messages", "turn 1 has a part 1 in 'content' that is not text (text)"),
        (parts({"type": "image_url"}), "messages", "turn 1 has a part 1 in 'content' that is not text (image_url)"),
        (parts("u"), "messages", "turn 1 has a part 1 in 'content' that is not text (text)"),
        (marked({"train": 0}), "messages", "turn 2 has a number in 'train', where true or false is required"),
        (marked({"weight": 0.5}), "messages", "turn 2 has a 'weight' that is neither 0 nor 1"),
        (marked({"weight": True}), "messages", "turn 2 has a 'weight' that is neither 0 nor 1"),
        (marked({"weight": 1, "train": False}), "messages", "turn 2 has 'train' and 'weight' that contradict"),
        (marked({"train": False}), "messages", "marks every answer as not to be learned"),
        ({"messages": [{"role": "user", "content": "u", "train": True}]}, "messages", "turn 1 asks to learn a user"),
        ({"system": "a", **messages(("system", "b"), ("user", "u"), ("assistant", "c"))}, "messages", "has a 'system'"),
        (alpaca(history="h"), "alpaca", "'history' is text, not a list of [prompt, answer]"),
        (alpaca(history=[["a"]]), "alpaca", "pair 1 of 'history' is not [prompt, answer], two texts"),
        (alpaca(history=[["a", "b"], ["c", " "]]), "alpaca", "pair 2 of 'history' holds an empty text"),
        (alpaca(), "commonsense", "has no 'answer'"),
        (alpaca(answer=None), "commonsense", "has null in 'answer', where text or a number is required"),
        ({"prompt": "p", "completion": " "}, "prompt-completion", "has an empty 'completion'"),
        ({"prompt": "p"}, "prompt-completion", "has no 'completion'"),
    ],
)  # fmt: skip
def test_faults_name_file_line_row_and_field(value, layout, message):
    assert fault_of(value, layout).startswith(f"d.json:10: row 1: {message}")


def test_history_comes_before_the_prompt_and_is_learned():
    record = alpaca(system="s", history=[["q1", "a1"], ["q2", "a2"]])
    found = turns(record, "alpaca")
    assert [(turn.role, turn.content) for turn in found] == [
        ("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "q2"), ("assistant", "a2"), ("user", "q"),
        ("assistant", "a"),
    ]  # fmt: skip
    assert all(turn.learned for turn in found)
    assert turns(alpaca(history=None), "alpaca") == turns(alpaca(history=[]), "alpaca") == turns(alpaca(), "alpaca")


def test_commonsense_is_alpaca_with_an_answer():
    for answer in ("true", 7, 2.5):
        assert turns(alpaca(answer=answer), "commonsense") == turns(alpaca(), "alpaca")


def test_content_may_be_parts_of_text_and_developer_is_system():
    record = parts({"type": "text", "text": "one "}, {"type": "text", "text": "two"})
    assert turns(record, "messages")[0] == Turn("user", "one two")
    assert turns(messages(("developer", "s"), ("user", "u"), ("assistant", "a")), "messages")[0] == Turn("system", "s")


@pytest.mark.parametrize("mark", [{"train": False}, {"weight": 0}, {"weight": 0.0, "train": None}])
def test_an_answer_that_is_marked_is_not_learned(mark):
    first = marked(mark)["messages"]
    record = {"messages": [*first, *marked({"train": True, "weight": 1})["messages"]]}
    assert [turn.learned for turn in turns(record, "messages") if turn.role == "assistant"] == [False, True]


def test_prompt_completion_learns_the_completion_alone():
    assert turns({"prompt": "p", "completion": "c"}, "prompt-completion") == (Turn("user", "p"), Turn("assistant", "c"))
    before = messages(("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"))["messages"]
    after = messages(("assistant", "b"))["messages"]
    found = turns({"prompt": before, "completion": after}, "prompt-completion")
    assert [(turn.content, turn.learned) for turn in found if turn.role == "assistant"] == [("a", False), ("b", True)]
    with raises_fault("SF-DATA-ROW", "d.json:10"):
        turns({"prompt": before[:3], "completion": [before[3], *after]}, "prompt-completion")


def test_a_system_field_stands_first():
    record = messages(("user", "u"), ("assistant", "a"))
    for name, turn_list in (("messages", record["messages"]), ("conversations", record["messages"])):
        assert turns({"system": "s", name: turn_list}, "messages")[0] == Turn("system", "s")


def test_only_these_orders_of_roles_pass():
    """All sequences of up to six roles against the rule written as a pattern."""
    pattern = re.compile(r"S?(UA(T+A)*)+")
    for length in range(1, 7):
        for roles in itertools.product(("system", "user", "assistant", "tool"), repeat=length):
            fits = pattern.fullmatch("".join(role[0].upper() for role in roles))
            record = messages(*((role, "x") for role in roles))
            if fits:
                assert tuple(turn.role for turn in turns(record, "messages")) == roles
            else:
                assert "row 1: " in fault_of(record, "messages")


def faults_of(values) -> list[str]:
    with pytest.raises(InputError) as caught:
        convert(rows(*values), "text", "d.json")
    return [str(fault) for fault in caught.value.faults]


def test_rows_with_one_fault_are_one_line_with_their_numbers():
    found = faults_of({"text": ""} if number % 2 else {"text": "x"} for number in range(40))
    assert len(found) == 1
    assert found[0].startswith("d.json:20: row 2: has an empty 'text'; the same in rows 4, 6, 8, 10, 12, 14, 16, 18 ")
    assert " and 11 more" in found[0]
    two = faults_of([{"text": "x"}, {"text": 3}, {"text": ""}, {"text": 4}])
    assert ["; the same in row 4" in line for line in two] == [True, False]
    assert [line.partition(":")[2][:9] for line in two] == ["20: row 2", "30: row 3"]


def test_twin_told_one_by_one_they_are_many(monkeypatch):
    class Own(fields.RowFault):
        def __init__(self, what: str, fix: str = ""):
            super().__init__(f"{what} ({next(count)})", fix)

    count = itertools.count()
    monkeypatch.setattr(fields, "RowFault", Own)
    with pytest.raises(AssertionError):
        test_rows_with_one_fault_are_one_line_with_their_numbers()


def test_all_kinds_of_faults_are_counted_and_the_first_are_listed():
    found = faults_of({"text": "x"} if number % 2 else {f"field{number}": "x"} for number in range(40))
    assert len(found) == 9
    assert found[0].startswith("d.json:10: row 1: ")
    assert found[-1] == "d.json: 12 more rows have faults"


TURN = {"messages": [{"role": "user", "content": "u"}], "sharegpt": [{"from": "human", "value": "u"}]}


@pytest.mark.parametrize(
    ("record", "layout", "reason"),
    [
        (alpaca(input=""), "alpaca", "'instruction', 'output'"),
        (alpaca(history=[["a", "b"]]), "alpaca", "'instruction', 'output', and also 'history'"),
        (alpaca(answer="x"), "commonsense", "'instruction', 'output', 'answer'"),
        ({"messages": TURN["messages"], "text": "x"}, "messages", "'messages', whose turns have 'role'"),
        ({"conversations": TURN["messages"]}, "messages", "'conversations', whose turns have 'role'"),
        ({"conversations": TURN["sharegpt"], "tools": "[]"}, "sharegpt", "'conversations', whose turns have 'from',"),
        ({"messages": TURN["sharegpt"]}, "sharegpt", "'messages', whose turns have 'from'"),
        ({"prompt": "p", "completion": "c"}, "prompt-completion", "'prompt', 'completion'"),
        ({"text": "x"}, "text", "'text'"),
    ],
)  # fmt: skip
def test_recognise_says_what_it_saw(record, layout, reason):
    (row,) = rows(record)
    assert recognise(row, "d.json")[0] == layout
    assert recognise(row, "d.json")[1].startswith(f"the first record has {reason}")


def test_preferences_are_not_taken_for_answers():
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    with raises_fault("SF-DATA-FORMAT", "d.json:10"):
        scan_format("answers", "auto", rows(pair), "d.json")
    scan_format(
        "answers", "auto", rows({"prompt": "p", "completion": "c", "rejected": "r"}), "d.json"
    )  # what columns make of it


def test_unrecognised_columns_and_their_nearest_name():
    with pytest.raises(InputError) as caught:
        recognise(*rows({"instruction": "q", "outputs": "a"}), "d.json")
    message = str(caught.value)
    assert message.startswith("d.json:10: row 1 has no known format: it has 'instruction', 'outputs'")
    assert "('outputs' looks like 'output')" in message
    assert "alpaca: 'instruction', 'output'" in message


def test_unused_fields_are_told():
    seen = scan_format(
        "answers", "alpaca", records := rows({"instruction": "q", "answer": "b"}, {"history": [], "id": 1}), "d"
    )
    for row in records * 2:
        seen.note_unused(row)
    assert seen.unused == ("answer", "id")
    record = {"messages": [{"role": "user", "content": "u", "weight": 0, "name": "n", "score": 1}], "id": 1}
    assert unused_in(record, "messages") == ["id", "messages[].score"]
    record = {"messages": [{"from": "human", "value": "u", "score": 1}]}
    assert unused_in(record, "sharegpt") == ["messages[].score"]


def test_a_function_of_the_user_reads_records():
    def read_record(record):
        if "story" in record:
            return record["story"]
        asked = [{"role": "user", "content": record["q"]}, {"role": "assistant", "content": record["a"]}]
        return {"messages": asked, "tools": [{"name": "f"}]} if record.get("tools") else asked

    def fault(value) -> str:
        with pytest.raises(InputError) as caught:
            converted(rows({"q": "q"}), reader_with(lambda record: value, "answers"), "d.json")
        return str(caught.value)

    read = reader_with(read_record, "answers")
    found = converted(rows({"story": "x"}, {"q": "q", "a": "a"}, {"q": "q", "a": "a", "tools": 1}), read, "d")
    assert [one.turns[0] for one in found] == [Turn("text", "x"), Turn("user", "q"), Turn("user", "q")]
    assert [(one.number, one.line, len(one.tools)) for one in found] == [(1, 10, 0), (2, 20, 0), (3, 30, 1)]
    with raises_fault("SF-DATA-ROW", "d.json:10"):
        converted(rows({"q": "q"}), read, "d.json")
    assert "row 1: the function that reads records returned NoneType" in fault(None)
    assert "row 1: the last turn is user" in fault([{"role": "user", "content": "q"}])
    assert "row 1: has an empty 'text'" in fault("")


def test_twin_without_the_order_check_accepts_two_prompts_in_a_row(monkeypatch):
    monkeypatch.setattr(turns_module, "check_order", lambda turns: None)
    monkeypatch.setattr(turns_module, "is_learned", lambda item, role: True)
    assert len(turns(messages(("user", "u"), ("user", "v"), ("assistant", "a")), "messages")) == 3
