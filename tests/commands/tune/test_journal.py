"""A search that was broken off goes on where it was; anything else is measured."""

from __future__ import annotations

import pytest

from helpers.tune_trials import made_up
from surefoot.commands.tune.attempt import Answer, Request
from surefoot.commands.tune.journal import Journal

ABOUT = {"model": "a", "data": "b"}
REQUESTS = [Request({"batch": {"micro": size}}, 2, 2) for size in (1, 2, 1, 4)]
ANSWERS = [Answer(made_up(size), whole=3.0) for size in (1.0, 2.0, 3.0)] + [Answer(None, "killed", 1.0)]


def ask(journal, requests=REQUESTS, answers=ANSWERS):
    """(the answers, how many were measured)."""
    measured = []

    def measure(answer):
        measured.append(answer)
        return answer

    found = [
        journal.answer(request, lambda answer=answer: measure(answer))
        for request, answer in zip(requests, answers, strict=True)
    ]
    return found, len(measured)


@pytest.mark.parametrize("count", range(5))
def test_after_a_kill_only_what_is_missing_is_measured(tmp_path, count):
    path = tmp_path / "kept.jsonl"
    ask(Journal(path, ABOUT), REQUESTS[:count], ANSWERS[:count])
    again = Journal(path, ABOUT)
    assert again.known == count
    assert ask(again) == (ANSWERS, len(REQUESTS) - count)
    assert Journal(path, ABOUT).known == len(REQUESTS)


def test_another_question_ends_what_is_given_back(tmp_path):
    path = tmp_path / "kept.jsonl"
    ask(Journal(path, ABOUT))
    journal = Journal(path, ABOUT)
    others = [REQUESTS[0], REQUESTS[3], REQUESTS[2], REQUESTS[3]]
    assert ask(journal, others)[1] == 3
    assert Journal(path, ABOUT).known == 4


@pytest.mark.parametrize("spoil", ["about", "torn", "nonsense"])
def test_a_file_about_something_else_or_damaged_says_nothing(tmp_path, spoil):
    path = tmp_path / "kept.jsonl"
    ask(Journal(path, ABOUT))
    text = path.read_text()
    path.write_text({"about": text, "torn": text[:-9], "nonsense": "\x00" * 20}[spoil])
    journal = Journal(path, {**ABOUT, "data": "c"} if spoil == "about" else ABOUT)
    assert journal.known == 0
    assert ask(journal)[1] == len(REQUESTS)
    assert Journal(path, {**ABOUT, "data": "c"} if spoil == "about" else ABOUT).known == len(REQUESTS)


def test_it_is_gone_at_the_end_and_without_a_path_never_there(tmp_path):
    journal = Journal(tmp_path / "kept.jsonl", ABOUT)
    ask(journal)
    journal.finish()
    nowhere = Journal(None, ABOUT)
    assert ask(nowhere)[1] == len(REQUESTS)
    nowhere.finish()
    assert list(tmp_path.iterdir()) == []
