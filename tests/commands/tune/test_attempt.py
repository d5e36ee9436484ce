"""Every request gets its own answer, whatever becomes of the process that gave the last one; no secret goes along."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import pytest

from surefoot.commands.tune.attempt import Request, workshop
from surefoot.commands.tune.journal import Journal
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
