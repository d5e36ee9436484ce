"""What answers score: surefoot's graders, functions of the user's own, servers; and what becomes of a lost score."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest

from helpers.faults import raises_fault
from surefoot.config.methods import RewardTerm
from surefoot.methods.rewards import terms
from surefoot.methods.rewards.answers import Answers
from surefoot.methods.rewards.graders import expected_fault
from surefoot.methods.rewards.terms import grade_all, needed_fields, of_function, open_rewards


def answers(*responses: str, records=None, stopped=True) -> Answers:
    count = len(responses)
    records = records or [{"answer": str(number)} for number in range(count)]
    return Answers(
        [f"question {number}" for number in range(count)],
        responses,
        [tuple(range(len(one))) for one in responses],
        records,
        [stopped] * count,
    )


def values(term: dict, found: Answers) -> list[float]:
    (reward,) = open_rewards([RewardTerm(**term)])
    return [one.value for one in reward.grade(found)]


@pytest.mark.parametrize(
    ("term", "record", "right", "wrong"),
    [
        ({"name": "exact"}, {"answer": "New York"}, ["new  york", " New York\n"], ["York", "New York!"]),
        ({"name": "exact", "pattern": "<a>(.*)</a>"}, {"answer": "x"}, ["hm <a>X</a>"], ["x", "<a>y</a>"]),
        ({"name": "numeric"}, {"answer": 1200}, ["so 1,200", "$1200.00", "3 and 2400/2"], ["12", "1200 or 3", "none"]),
        ({"name": "numeric", "field": "solution"}, {"solution": "#### -7"}, ["-7", "x = -7.0"], ["7", ""]),
        ({"name": "numeric", "pattern": r"#### (\S+)"}, {"answer": "3"}, ["4 #### 3"], ["3", "#### 4 3"]),
        ({"name": "choice"}, {"answer": "C"}, ["C", "not A but (C)", "the answer is C."], ["c", "Cats", "C, no: D"]),
        ({"name": "regex", "pattern": "<think>.*</think>"}, {}, ["<think>\n</think>x"], ["<think>"]),
        ({"name": "length", "longest": 3}, {}, ["abc", ""], ["abcd"]),
        ({"name": "json"}, {}, ['{"a": 1}', "```json\n[1]\n```"], ["{'a': 1}", "", '{"a": 1} and more']),
        (
            {"name": "json", "field": "schema"},
            {"schema": '{"type": "object", "required": ["a"]}'},
            ['{"a": 1}'],
            ["[1]", "{}"],
        ),
    ],
)
def test_graders(term, record, right, wrong):
    found = answers(*right, *wrong, records=[record] * (len(right) + len(wrong)))
    assert values(term, found) == [1.0] * len(right) + [0.0] * len(wrong)


def test_an_answer_without_an_end_is_too_long():
    assert values({"name": "length", "longest": 3}, answers("ab", stopped=False)) == [0.0]


@pytest.mark.parametrize(
    "term",
    [
        {"name": "numerik"},
        {"name": "regex"},
        {"name": "length"},
        {"name": "exact", "pattern": "a"},
    ],
)
def test_what_is_no_reward_is_refused_with_its_place(term):
    with raises_fault("SF-REWARD", "grpo.rewards[1].name"):
        open_rewards([RewardTerm(name="json"), RewardTerm(**term)])


@pytest.mark.parametrize(
    ("name", "record"), [("numeric", {"answer": "none"}), ("choice", {}), ("exact", {"answer": ""})]
)
def test_a_record_without_the_right_answer_is_a_fault_and_no_score_of_0(name, record):
    assert expected_fault(RewardTerm(name=name), record)
    assert not expected_fault(RewardTerm(name=name), {"answer": "A 1"})
    with raises_fault("SF-REWARD", "grpo.rewards"):
        values({"name": name}, answers("1", records=[record]))


def own(function) -> list:
    return of_function(function, "own")(answers("a", "bb", "ccc"))


def test_a_function_gets_the_fields_that_it_names_and_records_stay_with_their_answers():
    def score(prompts, responses, answer, response_ids):
        assert [int(prompt.split()[1]) for prompt in prompts] == [int(one) for one in answer]
        assert list(map(len, response_ids)) == list(map(len, responses))
        return [float(one) for one in answer]

    def everything(prompts, responses, **fields):
        assert sorted(fields) == ["answer", "records", "response_ids"]
        return [{"score": len(one), "reason": "its length"} for one in responses]

    assert [one.value for one in own(score)] == [0.0, 1.0, 2.0]
    assert [(one.value, one.reason) for one in own(everything)] == [(n, "its length") for n in (1.0, 2.0, 3.0)]


@pytest.mark.parametrize(
    ("declared", "convention", "turns", "needed"),
    [
        ("prompts, responses, answer, response_ids, records, unit='m'", None, False, ["answer"]),
        ("prompts, responses, /, *, answer, turns", None, True, ["answer"]),
        ("prompts, responses, turns", None, False, ["turns"]),
        ("*texts, answer, **fields", None, False, ["answer"]),
        ("completions, prompts, completion_ids, answer, **fields", "trl", False, ["answer"]),
    ],
)
def test_fields_that_a_function_cannot_do_without(tmp_path, declared, convention, turns, needed):
    (tmp_path / "own.py").write_text(f"def score({declared}):\n    return [0.0]\n")
    term = RewardTerm(name=f"{tmp_path / 'own.py'}:score", convention=convention)
    assert needed_fields(term, turns) == needed
    assert needed_fields(RewardTerm(name="json"), turns) == []


@pytest.mark.parametrize("turns", [False, True])
def test_a_function_of_trl_is_called_as_trl_does(turns):
    """Its prompts are those of the records, and an answer in a conversation is a list of one message."""
    prompts = [[{"role": "user", "content": text}] if turns else text for text in ("x", "y")]
    records = [{"prompt": prompt, "answer": str(place)} for place, prompt in enumerate(prompts)]
    given = Answers(["user: x", "user: y"], ["a", "bb"], [(1,), (2, 3)], records, [True, True])

    def score(completions, answer, completion_ids, prompts=None, trainer_state=None, **fields):
        assert prompts == [record["prompt"] for record in records]
        assert completion_ids == [[1], [2, 3]]
        assert trainer_state is None
        assert not fields
        texts = [one[0]["content"] if turns else one for one in completions]
        return [float(one) + len(text) for one, text in zip(answer, texts, strict=True)]

    assert [one.value for one in of_function(score, "own", "trl")(given)] == [1.0, 3.0]
    with raises_fault("SF-OWN-FUNCTION", "own"):  # surefoot's own way: a twin
        of_function(score, "own")(given)


def test_twin_shuffled_records_are_seen():
    """open-instruct#1484: prompts and right answers that part."""
    found = answers("0", "1", "2")
    apart = Answers(found.prompts, found.responses, found.response_ids, found.records[::-1], found.stopped)
    assert values({"name": "numeric"}, found) == [1.0, 1.0, 1.0]
    assert values({"name": "numeric"}, apart) == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("declared", "convention", "refused"),
    [
        ("completions, answer, **fields", None, True),
        ("prompts, completions", None, True),
        ("responses", None, True),
        ("completions, answer, **fields", "trl", False),
        ("prompts, responses", None, False),
        ("*texts, **fields", None, False),
    ],
)
def test_a_function_that_would_take_prompts_for_answers_is_refused_before_it_is_called(
    tmp_path, monkeypatch, declared, convention, refused
):
    (tmp_path / "own.py").write_text(f"def score({declared}):\n    return []\n")
    monkeypatch.chdir(tmp_path)
    with raises_fault("SF-OWN-FUNCTION", "grpo.rewards[0].name") if refused else nullcontext():
        open_rewards([RewardTerm(name="own.py:score", convention=convention)])


def test_what_is_lost_is_never_0(monkeypatch):
    """verl#5635: a grader that raises; OpenRLHF#1219: 0.0 that was taken for none."""

    def score(prompts, responses):
        if len(responses) > 1:
            raise ValueError("all at once")
        return [{"a": 0.0, "bb": math.nan, "ccc": None}[responses[0]]]

    def slow(prompts, responses):
        if "a" in responses:
            raise TimeoutError
        if "bb" in responses:
            raise KeyError("bb")
        return [1.0] * len(responses)

    assert own(score)[0].value == 0.0
    assert [one.outcome for one in own(score)] == ["scored", "not_finite", "not_asked"]
    assert [one.outcome for one in own(slow)] == ["timed_out", "raised", "scored"]
    real = terms._score
    monkeypatch.setattr(terms, "_score", lambda value, *where: real(value or None, *where))  # twin: OpenRLHF#1219
    assert own(score)[0].outcome == "not_asked"


def test_a_function_that_raises_for_all_ends_the_run():
    def broken(prompts, responses):
        raise KeyError("x")

    with raises_fault("SF-OWN-FUNCTION", "own"):
        own(broken)


@pytest.mark.parametrize("returned", [[1.0], None, ["a", "b", "c"], {"a": 1}])
def test_what_is_not_one_number_for_each_answer_is_refused(returned):
    with raises_fault("SF-OWN-FUNCTION", "own"):
        own(lambda prompts, responses: returned)


def test_scores_are_added_up_by_weight_and_a_lost_one_takes_the_answer_out(tmp_path):
    (tmp_path / "own.py").write_text(
        "def half(prompts, responses):\n    return [None if r == 'a' else 0.5 for r in responses]\n"
        "def lost(prompts, responses):\n    return [float('nan') if r == 'bb' else 1.0 for r in responses]\n"
    )
    terms = [
        RewardTerm(name="length", longest=2, weight=2.0),
        RewardTerm(name=f"{tmp_path}/own.py:half", weight=0.1),
        RewardTerm(name=f"{tmp_path}/own.py:lost"),
    ]
    rewards = open_rewards(terms)
    found = grade_all(rewards, answers("a", "bb", "ccc"))
    assert [one.label for one in rewards] == ["length", "half", "lost"]
    assert [found[0].total, found[2].total] == pytest.approx([2.0 + 1.0, 0.05 + 1.0])
    assert math.isnan(found[1].total)
    assert [one.outcome for one in found] == ["scored", "not_finite", "scored"]


def test_a_reward_is_known_again_by_what_is_in_its_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def one(prompts, responses):\n    return [1.0 for _ in responses]\n")
    (before,) = open_rewards([RewardTerm(name=f"{file}:one")])
    (heavier,) = open_rewards([RewardTerm(name=f"{file}:one", weight=2.0)])
    file.write_text("def one(prompts, responses):\n    return [2.0 for _ in responses]\n")
    (after,) = open_rewards([RewardTerm(name=f"{file}:one")])
    assert len({before.identity, heavier.identity, after.identity}) == 3
