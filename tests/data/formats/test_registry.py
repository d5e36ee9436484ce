"""Records become conversations, or are refused by row and field; nothing is repaired."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest

from helpers.converted_records import convert, converted, rows
from helpers.faults import gives, raises_fault
from surefoot.data.formats import Conversation, Turn, recognize, scan_format
from surefoot.data.formats import conversation as fields
from surefoot.data.formats import conversation as turns_module
from surefoot.data.formats.reader import reader_with
from surefoot.data.formats.registry import unused_in
from surefoot.system.errors import Fault, InputError


def conversation(value: dict, layout: str) -> Conversation:
    return convert(rows(value), layout, "d.json")[0]


def turns(value: dict, layout: str) -> tuple[Turn, ...]:
    return conversation(value, layout).turns


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
    ("value", "layout", "said"),
    [
        ({"instruction": "q", "ouput": "a"}, "alpaca", ("output", "instruction", "ouput")),
        ({"instruction": "q", "output": None}, "alpaca", ("null", "output")),
        ({"instruction": "q", "output": 3}, "alpaca", ("output",)),
        ({"instruction": "q", "output": True}, "alpaca", ("output",)),
        ({"instruction": ["q"], "output": "a"}, "alpaca", ("instruction",)),
        ({"instruction": "q", "output": ""}, "alpaca", ("output",)),
        ({"instruction": "q", "output": " \n"}, "alpaca", ("output",)),
        ({"instruction": "", "input": " ", "output": "a"}, "alpaca", ("instruction", "input")),
        ({"instruction": "q", "input": 5, "output": "a"}, "alpaca", ("input",)),
        ({"text": ""}, "text", ("text",)),
        ({"messages": []}, "messages", ("messages",)),
        ({"messages": "u"}, "messages", ("messages",)),
        ({"messages": ["u"]}, "messages", (1,)),
        ({"messages": [{"role": "user"}]}, "messages", (1, "content")),
        (messages(("user", "u"), ("assistant", "")), "messages", (2, "content")),
        (messages(("user", " "), ("assistant", "a")), "messages", (1, "content")),
        (messages(("User", "u")), "messages", (1, "User", "user")),
        (messages(("function", "u")), "messages", (1, "function")),
        (messages(("tool", "u")), "messages", (1, "tool", "user")),
        (messages(("user", "u")), "messages", ("user",)),
        (messages(("system", "s")), "messages", ("system",)),
        (messages(("user", "u"), ("user", "v")), "messages", (2, "user", "assistant")),
        (messages(("user", "u"), ("system", "v")), "messages", (2, "system", "assistant")),
        (messages(("user", "u"), ("tool", "v")), "messages", (2, "tool", "assistant")),
        (messages(("user", "u"), ("assistant", "a"), ("assistant", "b")), "messages", (3, "assistant", "user")),
        (parts({"type": "text"}), "messages", (1, "content")),
        (parts({"type": "image_url"}), "messages", (1, "content")),
        (parts("u"), "messages", (1, "content")),
        (marked({"train": 0}), "messages", (2, "train")),
        (marked({"weight": 0.5}), "messages", (2, "weight", 0, 1)),
        (marked({"weight": True}), "messages", (2, "weight", 0, 1)),
        (marked({"loss_weight": 0.5}), "messages", (2, "loss_weight", 0, 1)),
        (marked({"weight": 1, "train": False}), "messages", (2, "train", "weight")),
        (marked({"train": False}), "messages", ()),
        ({"messages": [{"role": "user", "content": "u", "train": True}]}, "messages", (1, "user")),
        ({"system": "a", **messages(("system", "b"), ("user", "u"), ("assistant", "c"))}, "messages", ("system",)),
        (alpaca(history="h"), "alpaca", ("history",)),
        (alpaca(history=[["a"]]), "alpaca", (1, "history")),
        (alpaca(history=[["a", "b"], ["c", " "]]), "alpaca", (2, "history")),
        (alpaca(), "commonsense", ("answer",)),
        (alpaca(answer=None), "commonsense", ("null", "answer")),
        ({"prompt": "p", "completion": " "}, "prompt-completion", ("completion",)),
        ({"prompt": "p"}, "prompt-completion", ("completion",)),
    ],
)  # fmt: skip
def test_faults_name_file_line_row_and_field(value, layout, said):
    with raises_fault("SF-DATA-ROW", "d.json:10", 1, *said):
        turns(value, layout)


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


@pytest.mark.parametrize(
    "mark",
    [
        {"train": False},
        {"weight": 0},
        {"weight": 0.0, "train": None},
        {"loss_weight": 0.0},
        {"loss": False},
        {"loss_scale": 0},
    ],
)
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
                with raises_fault("SF-DATA-ROW", "d.json:10", 1):
                    turns(record, "messages")


def faults_of(values) -> Sequence[Fault]:
    with pytest.raises(InputError) as caught:
        convert(rows(*values), "text", "d.json")
    return caught.value.faults


def test_rows_with_one_fault_are_one_line_with_their_numbers():
    found = faults_of({"text": ""} if number % 2 else {"text": "x"} for number in range(40))
    assert [(one.code, one.where, gives(one.what, 2)) for one in found] == [("SF-DATA-ROW", "d.json:20", True)]
    assert [number for number in range(3, 41) if gives(found[0].fix, number)] == [4, 6, 8, 10, 11, 12, 14, 16, 18]
    two = faults_of([{"text": "x"}, {"text": 3}, {"text": ""}, {"text": 4}])
    assert [gives(one.fix, 4) for one in two] == [True, False]
    assert [(one.where, gives(one.what, row)) for row, one in enumerate(two, 2)] == [
        ("d.json:20", True),
        ("d.json:30", True),
    ]


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
    assert (found[0].where, found[-1].where) == ("d.json:10", "d.json")
    assert gives(found[-1].what, 12)


TURN = {"messages": [{"role": "user", "content": "u"}], "sharegpt": [{"from": "human", "value": "u"}]}


@pytest.mark.parametrize(
    ("record", "layout", "fields"),
    [
        (alpaca(input=""), "alpaca", ["instruction", "output"]),
        (alpaca(history=[["a", "b"]]), "alpaca", ["instruction", "output", "history"]),
        (alpaca(answer="x"), "commonsense", ["instruction", "output", "answer"]),
        ({"messages": TURN["messages"], "text": "x"}, "messages", ["messages", "role"]),
        ({"conversations": TURN["messages"]}, "messages", ["conversations", "role"]),
        ({"conversations": TURN["sharegpt"], "tools": "[]"}, "sharegpt", ["conversations", "from"]),
        ({"messages": TURN["sharegpt"]}, "sharegpt", ["messages", "from"]),
        ({"prompt": "p", "completion": "c"}, "prompt-completion", ["prompt", "completion"]),
        ({"text": "x"}, "text", ["text"]),
    ],
)
def test_recognize_says_what_it_saw(record, layout, fields):
    (row,) = rows(record)
    found, reason = recognize(row, "d.json")
    assert (found, re.findall(r"'(\w+)'", reason)[: len(fields)]) == (layout, fields)


def test_preferences_are_not_taken_for_answers():
    pair = {"prompt": "p", "chosen": "c", "rejected": "r"}
    with raises_fault("SF-DATA-FORMAT", "d.json:10"):
        scan_format("answers", "auto", rows(pair), "d.json")
    scan_format(
        "answers", "auto", rows({"prompt": "p", "completion": "c", "rejected": "r"}), "d.json"
    )  # what columns make of it


def test_unrecognized_columns_and_their_nearest_name():
    with pytest.raises(InputError) as caught:
        recognize(*rows({"instruction": "q", "outputs": "a"}), "d.json")
    (fault,) = caught.value.faults
    assert (fault.code, fault.where) == ("SF-DATA-FORMAT", "d.json:10")
    assert all(gives(fault.what, value) for value in (1, "'instruction'", "'outputs'", "'output'"))
    assert gives(fault.fix, "alpaca")


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

    read = reader_with(read_record, "answers")
    found = converted(rows({"story": "x"}, {"q": "q", "a": "a"}, {"q": "q", "a": "a", "tools": 1}), read, "d")
    assert [one.turns[0] for one in found] == [Turn("text", "x"), Turn("user", "q"), Turn("user", "q")]
    assert [(one.number, one.line, len(one.tools)) for one in found] == [(1, 10, 0), (2, 20, 0), (3, 30, 1)]
    with raises_fault("SF-DATA-ROW", "d.json:10"):
        converted(rows({"q": "q"}), read, "d.json")
    for value, said in ((None, "NoneType"), ([{"role": "user", "content": "q"}], "user"), ("", "'text'")):
        with raises_fault("SF-DATA-ROW", "d.json:10", 1, said):
            converted(rows({"q": "q"}), reader_with(lambda record, value=value: value, "answers"), "d.json")


def test_twin_without_the_order_check_accepts_two_prompts_in_a_row(monkeypatch):
    monkeypatch.setattr(turns_module, "check_order", lambda turns: None)
    monkeypatch.setattr(turns_module, "is_learned", lambda item, role: True)
    assert len(turns(messages(("user", "u"), ("user", "v"), ("assistant", "a")), "messages")) == 3
