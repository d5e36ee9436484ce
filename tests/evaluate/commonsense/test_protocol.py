"""The eight sets: reading them, reading answers out of texts, scoring, and the published numbers beside them."""

import json
import math
from pathlib import Path

import pytest

from helpers.faults import raises_fault
from surefoot.evaluate.commonsense import protocol as commonsense
from surefoot.evaluate.commonsense.evaluation import is_told
from surefoot.evaluate.commonsense.protocol import (
    ORDER,
    PUBLISHED,
    SETS,
    Score,
    average,
    average_interval,
    choose_sets,
    extract,
    options_of,
    read_set,
    response_of,
)
from surefoot.system.errors import InputError

DATA = Path(__file__).parents[4] / "shared" / "data" / "commonsense"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="the shared data sets are not beside this checkout")
BY_NAME = {one.name: one for one in SETS}
ROUNDED = 0.06  # per cent: eight numbers rounded to a tenth, and their mean rounded again


def accuracy(one, texts) -> float:
    """Of these texts, on all records of a set."""
    records = read_set(DATA, one)
    return sum(extract(response_of(texts(record)), one) == record["answer"] for record in records) / len(records)


@needs_data
@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_gold_answers_score_all(one):
    assert accuracy(one, lambda record: record["output"]) == 1.0


@needs_data
@pytest.mark.parametrize("one", SETS, ids=lambda one: one.name)
def test_texts_without_an_answer_score_nothing(one):
    assert accuracy(one, lambda record: "The Correct Answer Is Not Known. TRUE, Answer1, OPTION2") == 0.0


@needs_data
def test_twin_the_last_match_is_another_rule(monkeypatch):
    """A response that goes on to another question, whose answer is not asked for."""
    one = BY_NAME["piqa"]

    def goes_on(record) -> str:
        other = "solution2" if record["answer"] == "solution1" else "solution1"
        return f"{record['output']}. Next: the correct answer is {other}"

    assert accuracy(one, goes_on) == 1.0
    monkeypatch.setattr(
        commonsense.re, "search", lambda pattern, text: list(commonsense.re.finditer(pattern, text))[-1]
    )
    records = read_set_with_findall(one)
    assert sum(extract(goes_on(record), one) == record["answer"] for record in records) == 0


def read_set_with_findall(one):
    return json.loads(commonsense.set_file(DATA, one).read_text())


@needs_data
def test_twin_a_vocabulary_of_another_set_finds_nothing():
    one, other = BY_NAME["hellaswag"], BY_NAME["piqa"]
    assert all(extract(record["output"], other) == "" for record in read_set(DATA, one))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("boolq", "the correct answer is true", "true"),
        ("boolq", "True", ""),
        ("boolq", "untrue or false", "true"),  # anywhere, within a word as well
        ("openbookqa", "not answer1 but answer2", "answer1"),
        ("openbookqa", "answer6", ""),
        ("social_i_qa", "answer10", "answer1"),
        ("piqa", "", ""),
    ],
)
def test_the_first_answer_anywhere_counts(name, text, expected):
    assert extract(text, BY_NAME[name]) == expected


def test_what_follows_a_second_heading_is_no_part_of_the_response():
    assert response_of(" so false\n### Response:\n true ") == "so false"


def test_options_are_those_of_the_instruction():
    one = BY_NAME["ARC-Easy"]
    assert options_of({"instruction": "… Answer format: answer1/answer2/answer3"}, one) == one.answers[:3]
    assert options_of({"instruction": "no format line"}, one) == one.answers


def test_score_and_average_by_hand():
    score, other = Score(3, 4), Score(1, 2)
    assert score.accuracy == 0.75
    assert math.isclose(score.standard_error, math.sqrt(0.75 * 0.25 / 4))
    mean, error = average([score, other])
    assert mean == 0.625  # not 4 of 6
    assert math.isclose(error, math.sqrt(score.standard_error**2 + other.standard_error**2) / 2)
    assert Score(4, 4).standard_error == 0


def test_intervals_are_wilsons():
    """Newcombe's table (1998) has 81 of 263, 15 of 148, 0 of 20 and 1 of 29."""
    printed = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for counts, interval in printed.items():
        assert Score(*counts).interval == pytest.approx(interval, abs=5e-5)
    assert Score(29 - 1, 29).interval == pytest.approx((1 - 0.1718, 1 - 0.0061), abs=5e-5)
    assert Score(0, 4).interval[1] > 0.4, "0 of 4 says little"
    assert Score(0, 4).standard_error == 0  # twin: what stood there before


def test_the_interval_of_an_average():
    score = Score(3, 4)
    assert average_interval([score]) == pytest.approx(score.interval)
    low, high = average_interval([score, score])
    below, above = (abs(end - score.accuracy) for end in score.interval)
    assert (0.75 - low, high - 0.75) == pytest.approx((below / math.sqrt(2), above / math.sqrt(2)))
    assert average_interval([Score(0, 4)] * 8)[1] > 0.1


def test_published_averages_are_those_of_their_row():
    assert tuple(one.name for one in SETS) == ORDER
    for row in PUBLISHED:
        assert abs(sum(row.accuracies) / 8 - row.average) < ROUNDED, row.name


def test_sets_by_name():
    assert choose_sets("all") == SETS
    assert [one.name for one in choose_sets("piqa, boolq")] == ["boolq", "piqa"]
    with raises_fault("SF-EVALUATE", "--sets", remedy=["ARC-Easy"]):
        choose_sets("boolq,arc-easy")
    with raises_fault("SF-EVALUATE", "--sets"):
        choose_sets(",")


RECORD = {"instruction": "Is it? Answer format: true/false", "input": "", "output": "x", "answer": "true"}


WRONG = (
    {**RECORD, "answer": "yes"},
    {**RECORD, "instruction": "Answer format: false"},
    {**RECORD, "instruction": 3},
    {"instruction": "Is it?"},
    "text",
)


def test_a_record_that_is_not_right_is_told_at_its_place(tmp_path):
    file = tmp_path / "boolq" / "test.json"
    file.parent.mkdir()
    for record in WRONG:
        file.write_text(json.dumps([RECORD, record], indent=1))
        with pytest.raises(InputError) as caught:
            read_set(tmp_path, BY_NAME["boolq"])
        (fault,) = caught.value.faults
        assert fault.where.startswith(f"{file}:"), record
        assert fault.code in ("SF-DATA-ROW", "SF-DATA-FORMAT"), record
        if record != "text":
            assert read_set(tmp_path, BY_NAME["boolq"], 1) == [RECORD]  # twin: the first one is right


def test_a_missing_set_says_what_the_layout_is(tmp_path):
    (tmp_path / "dataset").mkdir()
    with raises_fault(
        "SF-FILE-MISSING", f"{tmp_path}/dataset/piqa/test.json", remedy=["dataset/SET/test.json", "SET/test.json"]
    ):
        read_set(tmp_path, BY_NAME["piqa"])
    with raises_fault("SF-FILE-MISSING", tmp_path / "datasets", remedy=[tmp_path / "dataset"]):  # not a file in it
        read_set(tmp_path / "datasets", BY_NAME["piqa"])
    (tmp_path / "boolq.json").write_text("[]")
    with raises_fault("SF-USE-FOLDER", f"{tmp_path}/boolq.json", remedy=[tmp_path]):
        read_set(tmp_path / "boolq.json", BY_NAME["boolq"])


@pytest.mark.parametrize(("total", "rows", "lines"), [(1838, 8, 10), (200, 8, 10), (16, 8, 2), (5, 1, 5), (5, 8, 1)])
def test_a_set_has_at_most_ten_lines_of_progress_and_always_the_last(total, rows, lines):
    ends = [min(start + rows, total) for start in range(0, total, rows)]
    told = [now for before, now in zip([0, *ends], ends, strict=False) if is_told(before, now, total)]
    assert (len(told), told[-1]) == (lines, total)
