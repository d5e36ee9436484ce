"""Graders that run in processes of their own: math-verify, and unit tests of programs that the model wrote.

    math    math-verify finds the answer's last formula equal to the field's; one process for the run, ended and begun
            anew where an answer takes it too long
    code    the program passes all tests of the field; a process for each answer, see `confined`

The clock is this process's. math-verify's own limits are signals, which do nothing outside a main thread: its answer is
then an exception or nothing, which is what became zero rewards elsewhere (verl#5635). An answer that math-verify does
not finish, or that ends its process, has no score. A program that uses up its CPU time has failed its tests; one that
the machine gave too little of it has no score.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import math
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from surefoot.config.methods import RewardTerm
from surefoot.methods.rewards import confined
from surefoot.methods.rewards.answers import Answers, Grade, Score
from surefoot.system.errors import EnvironmentFault, Fault, InputError

_FILE = str(Path(confined.__file__))
_START = 120.0  # seconds until math-verify is imported: sympy is large, and disks can be slow
_SLOWER = 6  # times its CPU time that a program may take on the clock: the machine may be busy
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
TESTS = "tests"  # field of a record
SECONDS = 5.0


class MathProcess:
    """The process that compares formulas. Calls from several threads wait for each other.

    limit: seconds for one comparison.
    """

    def __init__(self, limit: float):
        self._limit, self._lock = limit, threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def compare(self, right: str, answer: str | None, *, bare: bool) -> Score | Mapping[str, Any]:
        """What the process says, or why it says nothing.

        right: a formula or a number, bare or in a text.
        answer: None: only whether `right` can be read is asked.
        bare: the answer is a formula too, not a text that ends in one.
        """
        with self._lock:
            started = self._process is not None and self._process.poll() is None
            process = self._process if started and self._process is not None else self._start()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps({"right": right, "answer": answer, "bare": bare}).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                return self._ended(process)
            ready, _, _ = select.select([process.stdout], [], [], self._limit if started else _START + self._limit)
            if not ready:
                self.end()
                return Score(math.nan, f"math-verify did not answer within {self._limit:g} s", "timed_out")
            line = process.stdout.readline()
            found = json.loads(line) if line.endswith(b"\n") else None
            if found is None:
                return self._ended(process)
        return Score(math.nan, found["raised"], "raised") if "raised" in found else found

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-I", "-B", _FILE, "math"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())
        return self._process

    def _ended(self, process: subprocess.Popen[bytes]) -> Score:
        process.wait()
        self._process = None
        return Score(math.nan, f"the process of math-verify {_ending(process.returncode)}", "raised")


_PROCESSES: dict[float, MathProcess] = {}  # by their limit: one serves the data's check and all of a run's rollouts


def _math_process(limit: float) -> MathProcess:
    if limit not in _PROCESSES:
        _PROCESSES[limit] = MathProcess(limit)
        atexit.register(_PROCESSES[limit].end)
    return _PROCESSES[limit]


def math_grader(term: RewardTerm, key: str, pattern: re.Pattern[str] | None) -> Grade:
    """Raises InputError where math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        what = "math needs the package math-verify, which is not installed"
        raise InputError(Fault(key, what, "pip install 'surefoot[math]'", code="SF-PACKAGE"))
    process, field = _math_process(term.seconds or SECONDS), term.field or "answer"

    def one(words: str, record: Mapping[str, Any]) -> Score:
        if pattern is not None:
            match = pattern.search(words)
            if match is None:
                return Score(0.0, f"{pattern.pattern!r} is not found")
            words = match[1] or ""
        found = process.compare(str(record.get(field, "")), words, bare=pattern is not None)
        if isinstance(found, Score):
            return found
        if found["said"] is None:
            return Score(0.0, "no formula in the answer")
        return Score(float(found["same"]), f"{found['said'][:60]}, and {found['right'][:60]} is right")

    return lambda answers: [one(*pair) for pair in zip(answers.responses, answers.records, strict=True)]


def math_fault(term: RewardTerm, record: Mapping[str, Any]) -> str:
    """Why math-verify cannot read the right answer; empty where it can."""
    field = term.field or "answer"
    value = record.get(field)
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        return f"has no right answer for math in {field!r}"
    found = _math_process(term.seconds or SECONDS).compare(str(value), None, bare=False)
    why = found.reason if isinstance(found, Score) else "" if found["right"] is not None else "no formula"
    return f"has a right answer in {field!r} that math-verify cannot read ({why})" if why else ""


def code_grader(term: RewardTerm, key: str, pattern: re.Pattern[str] | None) -> Grade:
    """Raises EnvironmentFault where this machine cannot confine programs."""
    if why := confined.can_confine():
        fix = "let a server of your own run them (grpo.rewards takes its address)"
        raise EnvironmentFault(Fault(key, f"programs cannot be confined here: {why}", fix, code="SF-REWARD"))
    seconds, field = math.ceil(term.seconds or SECONDS), term.field or TESTS

    def one(pair: tuple[str, Mapping[str, Any]]) -> Score:
        words, record = pair
        found = (pattern or _BLOCK).findall(words)
        if pattern is not None and not found:
            return Score(0.0, f"{pattern.pattern!r} is not found")
        return run_program(found[-1] if found else words, tests_in(record, field), seconds)

    def grade(answers: Answers) -> list[Score]:
        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(one, zip(answers.responses, answers.records, strict=True)))

    return grade


def run_program(program: str, tests: Sequence[str], seconds: int, *, on_the_clock: float | None = None) -> Score:
    """1 where the program passes all tests.

    seconds: of CPU time.
    on_the_clock: seconds after which it is ended; None: as many times more as a busy machine may need.

    Raises EnvironmentFault where the process cannot confine itself.
    """
    word = secrets.token_hex(8)
    request = json.dumps({"program": program, "tests": list(tests), "word": word, "seconds": seconds}) + "\n"
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-B", _FILE, "code"],
            input=request.encode(),
            capture_output=True,
            timeout=on_the_clock or _SLOWER * (seconds + 1),
            env=_environment(),
        )
    except subprocess.TimeoutExpired as error:
        return Score(math.nan, f"the program had no end within {error.timeout:g} s on the clock", "timed_out")
    except OSError as error:
        return Score(math.nan, f"no process for the program: {error}", "raised")
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = {}
    if isinstance(said, dict) and "refused" in said and done.returncode == 0 and "word" not in said:
        what = f"a program cannot be confined: {said['refused']}"
        raise EnvironmentFault(Fault("grpo.rewards", what, "use another machine or container", code="SF-REWARD"))
    if not isinstance(said, dict) or said.get("word") != word:
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Score(0.0, f"the program used more than {seconds} s of CPU time, or was ended for its memory")
        return Score(0.0, f"the program {_ending(done.returncode)} before its tests were done")
    passed, count = said["passed"], len(tests)
    return Score(float(passed == count), f"{passed} of {count} tests pass{'; ' if said['why'] else ''}{said['why']}")


def tests_in(record: Mapping[str, Any], field: str) -> list[str]:
    """A text is one test, a list of texts several; none where there are none."""
    value = record.get(field)
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [one for one in given if isinstance(one, str) and one.strip()] if given else []


def code_fault(term: RewardTerm, record: Mapping[str, Any]) -> str:
    field = term.field or TESTS
    return "" if tests_in(record, field) else f"has no tests for code in {field!r}"


def _environment() -> dict[str, str]:
    """Nothing of this process's: it may hold keys."""
    return {"PATH": os.defpath, "PYTHONHASHSEED": "0"}


def _ending(code: int) -> str:
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
