"""Every request gets its own answer, whatever becomes of the process that gave the last one; a search that was broken
off goes on where it was.
"""

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict

import pytest

from helpers.faults import gives
from helpers.tune_trials import made_up
from surefoot.commands.tune.attempt import NOT_DONE, Answer, Journal, Request, workshop
from surefoot.system.errors import NO_MEMORY

SECRET = "hf_abcdefgh12345678"
# A worker whose trials say how many steps they were asked for, and come to their end in various ways. What takes real
# trials, and imports torch for it, is left out.
WORKER = """
import atexit, os, signal, sys, time, types
sys.modules["surefoot.runs.trial"] = types.SimpleNamespace(Rival=tuple, run_trial=None)
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


@contextmanager
def stubbed(trial: str, worker: str = "pass", *, forks: bool = True):
    """A workshop whose trials do what `trial` says."""
    with workshop(forks=forks) as shop:
        program = WORKER.replace("IN_TRIAL", trial).replace("IN_WORKER", worker)
        shop._program = [sys.executable, "-c", program, *(["fork"] if forks else [])]
        yield shop


def answers(trial: str, worker: str, *steps: int):
    """Of one worker after the other to as many requests."""
    with stubbed(trial, worker) as shop:
        return [shop.attempt(Request({}, one, 1)) for one in steps]


def test_without_forks_every_trial_has_a_process_of_its_own():
    with stubbed("pass", forks=False) as shop:
        for steps in (1, 2):
            assert shop.attempt(Request({}, steps, 1)).failure == f"steps: {steps}"
            assert shop._worker is None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")
def test_copies_share_a_worker_that_ends_with_a_trial_that_takes_too_long():
    with stubbed("if steps == 2: raise TypeError\n    if steps == 3: time.sleep(60)") as shop:
        shop.attempt(Request({}, 1, 1))
        worker = shop._worker
        assert worker is not None
        assert shop.attempt(Request({}, 2, 1)).trial is None
        assert (shop._worker, worker.poll()) == (worker, None)
        late = shop.attempt(Request({}, 3, 1), limit=0.2)
        assert (late.trial, late.code) == (None, NOT_DONE)
        assert worker.poll() is not None


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")
@pytest.mark.parametrize(
    ("trial", "worker"),
    [("atexit.register(os._exit, 9)", "pass"), ("pass", "worker._say = say_and_die")],
    ids=["a library fails at the end", "killed before the end"],
)
def test_a_copy_that_dies_after_its_answer_answers_no_other_request(trial, worker):
    assert [one.failure for one in answers(trial, worker, 3, 4, 5)] == ["steps: 3", "steps: 4", "steps: 5"]


ENDS = {  # the number of steps asked for -> what becomes of the trial
    1: f"raise RuntimeError('refused: token={SECRET}')",
    2: f"raise SurefootError(errors.Fault('step 1', 'no room', code='{NO_MEMORY}'))",
    3: "raise SurefootError('the memory of herons is long')",
    4: "os._exit(9)",
    5: "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no copies elsewhere")
def test_what_ran_out_of_memory_has_its_code_and_last_words_no_secret(tmp_path):
    trial = "\n    ".join(f"if steps == {number}: {end}" for number, end in ENDS.items())
    found = answers(trial, "pass", *ENDS)
    assert [one.trial for one in found] == [None] * len(ENDS)
    assert [one.code for one in found] == ["", NO_MEMORY, "", "", NO_MEMORY]
    assert gives(found[0].failure, "RuntimeError")
    assert gives(found[0].failure, "token=…")
    path = tmp_path / "kept.jsonl"
    Journal(path, {}).answer(Request({}, 1, 1), lambda: found[0])
    assert SECRET not in path.read_text(encoding="utf-8") + json.dumps(asdict(found[0]))


ABOUT = {"model": "a", "data": "b"}
REQUESTS = [Request({"batch": {"micro": size}}, 2, 2) for size in (1, 2, 1, 4)]
ANSWERS = [Answer(made_up(size), whole=3.0) for size in (1.0, 2.0, 3.0)] + [Answer(None, "killed", 1.0)]


def ask(journal, requests=REQUESTS, answers=ANSWERS):
    """(the answers, how many were measured)."""
    measured = []
    found = [
        journal.answer(request, lambda answer=answer: measured.append(1) or answer)
        for request, answer in zip(requests, answers, strict=True)
    ]
    return found, len(measured)


def test_after_a_kill_only_what_is_missing_is_measured(tmp_path):
    for count in range(len(REQUESTS) + 1):
        path = tmp_path / f"{count}.jsonl"
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
