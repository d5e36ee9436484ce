"""Preference data is refused by supervised training, with advice that works for the file at hand."""

from __future__ import annotations

import re

import pytest

from helpers.converted_records import convert, rows
from helpers.faults import raises_fault
from surefoot.data.formats import registry as preferences
from surefoot.data.formats import scan_format

DIALOGUE = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def advice(record):
    with raises_fault("SF-DATA-FORMAT", "d.json:10") as caught:
        scan_format("answers", "auto", rows(record), "d.json")
    return caught.value.faults[0].fix


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "p", "chosen": "c"},
        {"question": "p", "chosen": "c"},
        {"prompt": DIALOGUE[:1], "chosen": DIALOGUE[1:]},
        {"chosen": DIALOGUE},
        {"chosen": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ],
)
def test_the_columns_that_are_advised_read_the_record(record):
    record["rejected"] = record["chosen"]
    fix = advice(record)
    columns = dict(re.findall(r"(\w+): (\w+)", fix.partition("{")[2]))
    renamed = rows({field: record[own] for field, own in columns.items()})
    layout = scan_format("answers", "auto", renamed, "d.json").layout
    assert convert(renamed, layout, "d.json")[0].turns[-1].text in ("c", "a")


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": [{"from": "human", "value": "q"}], "chosen": {"from": "gpt", "value": "a"}},
        {"instruction": "", "chosen": "c"},
        {"text": "t", "chosen": 3},
    ],
)
def test_where_no_columns_could_read_it_none_are_advised(record):
    assert "columns" not in advice({**record, "rejected": record["chosen"]})


def check_marked_answers(*values):
    with raises_fault("SF-DATA-FORMAT", "d.json:20", remedy=["kto"]):
        scan_format("answers", "auto", rows(*values), "d.json")


MARKED = [
    ({"messages": DIALOGUE, "label": True}, {"messages": DIALOGUE, "label": False}),
    ({"prompt": "p", "completion": "c", "label": True}, {"prompt": "p", "completion": "d", "label": False}),
    ({"instruction": "i", "output": "o", "label": True}, {"instruction": "i", "output": "p", "label": False}),
    ({"input_ids": [5, 6], "label": True}, {"input_ids": [5, 7], "label": False}),
    ({"messages": DIALOGUE, "kto_tag": True}, {"messages": DIALOGUE, "label": None, "kto_tag": False}),
]


@pytest.mark.parametrize("values", MARKED)
def test_answers_marked_as_bad_are_refused(values):
    check_marked_answers(*values)


def test_twin_without_the_look_at_labels_they_would_be_learned(monkeypatch):
    monkeypatch.setattr(preferences, "_JUDGED", ())
    with pytest.raises(pytest.fail.Exception):
        check_marked_answers(*MARKED[0])


@pytest.mark.parametrize(
    "value",
    [
        {"messages": DIALOGUE, "label": True},
        {"messages": DIALOGUE, "label": 0},
        {"messages": DIALOGUE, "label": "false"},
        {"text": "a review", "label": False},
    ],
)
def test_labels_of_another_kind_and_good_answers_are_not_refused(value):
    scan_format("answers", "auto", rows(value), "d.json")
