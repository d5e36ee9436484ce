"""Preference records, judged answers and prompts: every published way of writing one gives the same conversation."""

from __future__ import annotations

import pytest

from helpers.converted_records import convert, rows
from helpers.faults import gives, raises_fault
from surefoot.data.formats import preference as ranking
from surefoot.data.formats import retag, scan_format

ASKED, BETTER, WORSE = "What is a fjord?", "An inlet of the sea.", "A bird."
HUMAN = f"\n\nHuman: {ASKED}\n\nAssistant:"


def role(name, text):
    return {"role": name, "content": text}


def turn(name, text):
    return {"from": name, "value": text}


USER, GOOD, BAD = role("user", ASKED), role("assistant", BETTER), role("assistant", WORSE)
ONE_TURN = {
    "texts": {"prompt": ASKED, "chosen": BETTER, "rejected": WORSE},
    "hh with a prompt": {"prompt": HUMAN, "chosen": f" {BETTER}", "rejected": f" {WORSE}"},
    "hh, whole": {"chosen": f"{HUMAN} {BETTER}", "rejected": f"{HUMAN} {WORSE}"},
    "rm-static": {"prompt": HUMAN, "response": "x", "chosen": f" {BETTER}", "rejected": f" {WORSE}"},
    "trl": {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
    "trl, implicit prompt": {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "ultrafeedback": {"prompt": ASKED, "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    "text prompt, listed answers": {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
    "llama-factory, sharegpt": {
        "conversations": [turn("human", ASKED)],
        "chosen": turn("gpt", BETTER),
        "rejected": turn("gpt", WORSE),
    },
    "llama-factory, openai": {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    "llama-factory, alpaca": {"instruction": ASKED, "input": "", "chosen": BETTER, "rejected": WORSE},
}


def plain(conversation):
    return [(one.role, one.text, one.learned) for one in conversation.turns]


def read(layout, *values):
    return convert(rows(*values), layout, "d.json")


@pytest.mark.parametrize("name", ONE_TURN)
def test_a_pair_is_two_conversations_of_one_record(name):
    better, worse = read("preference", ONE_TURN[name])
    assert plain(better) == [("user", ASKED, True), ("assistant", BETTER, True)] or plain(better) == [
        ("user", ASKED, False),
        ("assistant", BETTER, True),
    ]
    assert plain(worse)[1:] == [("assistant", WORSE, True)]
    assert (better.good, worse.good) == (True, False)
    assert (better.number, worse.number, better.line) == (1, 1, 10)


@pytest.mark.parametrize("name", ONE_TURN)
def test_its_prompt_alone(name):
    (prompt,) = read("prompts", ONE_TURN[name])
    assert [(one.role, one.text) for one in prompt.turns] == [("user", ASKED)]


def test_twin_a_prompt_that_keeps_its_answer_is_seen(monkeypatch):
    own = ranking._split_turns
    monkeypatch.setattr(ranking, "_split_turns", lambda *both: ([*own(*both)[0], own(*both)[1][0]], *own(*both)[1:]))
    with raises_fault("SF-DATA-ROW", "d.json:10", 1):
        read("preference", ONE_TURN["trl, implicit prompt"])


def test_a_longer_dialogue_becomes_turns_and_earlier_answers_are_not_learned():
    before = f"You teach.\n\nHuman: Hi\n\nAssistant: Hello.{HUMAN}"
    whole = {"chosen": f"{before} {BETTER}", "rejected": f"{before} {WORSE}"}
    better, _ = read("preference", whole)
    assert [(one.role, one.text) for one in better.turns] == [
        ("system", "You teach."),
        ("user", "Hi"),
        ("assistant", "Hello."),
        ("user", ASKED),
        ("assistant", BETTER),
    ]
    assert [one.learned for one in better.turns if one.role == "assistant"] == [False, True]
    assert read("preference", {"prompt": before, "chosen": BETTER, "rejected": WORSE})[0].turns == better.turns


def test_equal_dialogues_split_before_the_last_answer():
    for record in (
        {"chosen": f"{HUMAN} x", "rejected": f"{HUMAN} x"},
        {"chosen": [USER, GOOD], "rejected": [USER, GOOD]},
    ):
        better, worse = read("preference", record)
        assert better.turns == worse.turns
        assert [one.role for one in better.turns] == ["user", "assistant"]


def test_an_answer_may_say_nothing():
    _, worse = read("preference", {"prompt": HUMAN, "chosen": " x", "rejected": ""})
    assert worse.turns[-1].text == ""


def test_words_and_roles_of_a_description_reach_the_answers():
    record = {"conversations": [{"who": "client", "says": "q"}]}
    record |= {"chosen": {"who": "bot", "says": "a"}, "rejected": {"who": "bot", "says": "b"}}
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "client", "assistant_tag": "bot"}
    better, worse = convert(retag(rows(record), tags), "preference", "d.json")
    assert (better.turns[-1].text, worse.turns[-1].text) == ("a", "b")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"chosen": "a", "rejected": "b"}, ()),
        ({"prompt": "q", "chosen": "a"}, ("'rejected'",)),
        ({"prompt": "q", "chosen": "a", "rejected": [BAD]}, ("'chosen'", "'rejected'")),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [BAD]}, ()),
        ({"prompt": [USER, GOOD], "chosen": [GOOD], "rejected": [BAD]}, (3, "assistant")),
        ({"chosen": [USER, GOOD], "rejected": [role("user", "other"), BAD]}, ("turn",)),
        ({"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: c\n\nAssistant: d"}, ("beginning",)),
    ],
)
def test_what_is_no_pair(record, said):
    with raises_fault("SF-DATA-ROW", "d.json:10", 1, *said):
        read("preference", record)


JUDGED = {
    "trl": {"prompt": ASKED, "completion": WORSE, "label": False},
    "trl, messages": {"prompt": [USER], "completion": [BAD], "label": False},
    "hh": {"prompt": HUMAN, "completion": f" {WORSE}", "label": False},
    "llama-factory, openai": {"messages": [USER, BAD], "label": False},
    "llama-factory, sharegpt": {"conversations": [turn("human", ASKED), turn("gpt", WORSE)], "kto_tag": False},
    "llama-factory, alpaca": {"instruction": ASKED, "output": WORSE, "label": 0},
}


@pytest.mark.parametrize("name", JUDGED)
def test_a_judged_answer(name):
    (found,) = read("judged", JUDGED[name])
    assert [(one.role, one.text) for one in found.turns] == [("user", ASKED), ("assistant", WORSE)]
    assert found.good is False
    mark = "kto_tag" if "kto_tag" in JUDGED[name] else "label"
    assert read("judged", JUDGED[name] | {mark: True})[0].good is True


def test_only_the_last_answer_is_judged():
    (found,) = read("judged", {"messages": [USER, GOOD, USER, BAD], "label": True})
    assert [one.learned for one in found.turns if one.role == "assistant"] == [False, True]


@pytest.mark.parametrize("label", ["yes", None, 2, 0.5])
def test_a_verdict_is_true_or_false(label):
    with raises_fault("SF-DATA-ROW", "d.json:10", 1, "'label'"):
        read("judged", {"prompt": "q", "completion": "a", "label": label})


@pytest.mark.parametrize("good", [True, False])
def test_a_verdict_of_null_is_none_where_a_table_has_both_columns(good):
    for marks in ({"label": None, "kto_tag": good}, {"label": good, "kto_tag": None}):
        assert read("judged", {"prompt": "q", "completion": "a", **marks})[0].good is good


PROMPTS = {
    "a text": {"prompt": ASKED},
    "hh": {"prompt": HUMAN},
    "messages": {"prompt": [USER]},
    "an open conversation": {"messages": [USER]},
    "answers": {"messages": [USER, GOOD]},
    "sharegpt": {"conversations": [turn("human", ASKED), turn("gpt", BETTER)]},
    "prompt and completion": {"prompt": ASKED, "completion": BETTER},
    "alpaca": {"instruction": ASKED, "output": BETTER},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_of_any_record(name):
    assert scan_format("prompts", "auto", rows(PROMPTS[name]), "d.json").layout == "prompts"
    (found,) = read("prompts", PROMPTS[name])
    assert [(one.role, one.text) for one in found.turns] == [("user", ASKED)]


@pytest.mark.parametrize(
    ("kind", "record", "stages"),
    [
        ("pairs", {"instruction": "q", "output": "a"}, ("sft",)),
        ("pairs", {"text": "t"}, ("pretrain",)),
        ("pairs", {"prompt": "q", "completion": "a", "label": True}, ("kto",)),
        ("judged", ONE_TURN["texts"], ("reward", "dpo")),
        ("judged", {"prompt": "q", "completion": "a"}, ("sft",)),
        ("prompts", {"text": "t"}, ("pretrain",)),
    ],
)
def test_records_of_another_kind_are_refused_with_their_stage(kind, record, stages):
    with raises_fault("SF-DATA-FORMAT", "d.json:10", *stages) as caught:
        scan_format(kind, "auto", rows(record), "d.json")
    assert caught.value.faults[0].fix


def test_the_reason_says_how_records_are_written():
    both = rows(ONE_TURN["hh, whole"], ONE_TURN["trl"])
    seen = scan_format("pairs", "auto", both, "d.json")
    layout, reason = seen.layout, seen.reason
    assert layout == "preference"
    assert all(gives(reason, value) for value in (1, "'chosen'", "'rejected'"))


def test_a_template_without_marks_leaves_a_dialogue_in_its_text():
    whole = [("user", HUMAN), ("assistant", f" {BETTER}")]
    for name in ("hh with a prompt", "hh, whole", "rm-static"):
        better, worse = (ranking.unsplit(ONE_TURN[name]) for _ in range(2))
        found = [read("preference", one)[0] for one in (better, worse)]
        assert all([(turn.role, turn.text) for turn in one.turns] == whole for one in found)
        assert [(turn.role, turn.text) for turn in read("preference", ONE_TURN[name])[0].turns] != whole
    for name in ("trl", "llama-factory, alpaca"):
        assert ranking.unsplit(ONE_TURN[name]) == ONE_TURN[name]
