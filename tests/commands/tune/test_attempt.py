"""Every request gets its own answer, whatever becomes of the process that gave the last one; no secret goes along.
A search that was broken off goes on where it was; anything else is measured.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest

from helpers.tune_trials import made_up
from surefoot.commands.tune.attempt import Answer, Journal, Request, workshop
from surefoot.system.errors import NO_MEMORY

SECRET = "hf_abcdefgh12345678"
# A worker whose trials say how many steps they were asked for, and come to their end in various ways.
WORKER = """
import atexit, os, signal
from surefoot.system import errors
from surefoot.system.errors import SurefootError
from surefoot.commands.tune import worker

def run_trial(config, *, steps, **_):
    IN_TRIAL
    raise SurefootError(f"steps: {steps}")

def say_and_die(asked, answer, out, say=worker._say, here=os.getpid()):
    say(asked, answer, out)
    if os.getpid() != here:
        os.kill(os.getpid(), signal.SIGKILL)

worker.check_config, worker.run_trial = dict, run_trial
IN_WORKER
worker.main()
"""


def answers(trial: str, worker: str, *steps: int):
    """Of one worker after the other to as many requests."""
    with workshop(forks=True) as shop:
        shop._program = [sys.executable, "-c", WORKER.replace("IN_TRIAL", trial).replace("IN_WORKER", worker), "fork"]
        return [shop.attempt(Request({}, one, 1)) for one in steps]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")
@pytest.mark.parametrize(
    ("trial", "worker"),
    [("atexit.register(os._exit, 9)", "pass"), ("pass", "worker._say = say_and_die")],
    ids=["a library fails at the end", "killed before the end"],
)
def test_a_copy_that_dies_after_its_answer_answers_no_other_request(trial, worker):
    assert [one.failure for one in answers(trial, worker, 3, 4, 5)] == ["steps: 3", "steps: 4", "steps: 5"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")
def test_the_last_word_of_a_trial_that_breaks_off_is_told_and_kept_without_secrets(tmp_path):
    (answer,) = answers(f"raise RuntimeError('refused: token={SECRET}')", "pass", 1)
    assert answer.failure == "broke off with exit code 1: RuntimeError: refused: token=…"
    path = tmp_path / "kept.jsonl"
    Journal(path, {}).answer(Request({}, 1, 1), lambda: answer)
    assert SECRET not in path.read_text(encoding="utf-8") + json.dumps(asdict(answer))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")
@pytest.mark.parametrize(
    ("trial", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", NO_MEMORY),
        (f"raise SurefootError(errors.Fault('step 1', 'no room', code='{NO_MEMORY}'))", NO_MEMORY),
        ("raise SurefootError('the memory of herons is long')", ""),
        ("os._exit(9)", ""),
    ],
)
def test_what_ran_out_of_memory_is_told_by_its_code(trial, code):
    (answer,) = answers(trial, "pass", 1)
    assert answer.trial is None
    assert answer.code == code


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
