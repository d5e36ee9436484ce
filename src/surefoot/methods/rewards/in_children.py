"""Graders in separate processes: math-verify, and unit tests of programs that the model wrote.

    math    math-verify finds the answer's last formula equal to the field's; one process for the run, restarted after
            a timeout
    code    the program passes all tests of the field; a process for each answer, see `confined`

This process limits the time. math-verify's own limits are signals, which work only in a main thread; elsewhere they
led to silent zero rewards (verl#5635). An answer on which math-verify times out, or that ends its process, has no
score. A program that exceeds its CPU time fails its tests; one that got too little of it from the machine has no score.
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
_START = 120.0  # seconds to import math-verify: sympy is large, and disks can be slow
_SLOWER = 6  # wall time limit as a multiple of CPU time: the machine may be busy
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
        """Return the result of the process, or why there is none.

        right: a formula or a number, bare or in a text.
        answer: None: only check whether `right` can be parsed.
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


_PROCESSES: dict[float, MathProcess] = {}  # by their limit: one process for the data check and all rollouts


def _math_process(limit: float) -> MathProcess:
    if limit not in _PROCESSES:
        _PROCESSES[limit] = MathProcess(limit)
        atexit.register(_PROCESSES[limit].end)
    return _PROCESSES[limit]


def math_grader(term: RewardTerm, key: str, pattern: re.Pattern[str] | None) -> Grade:
    """Raise InputError if math-verify is not installed."""
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
            return Score(0.0, "the answer contains no formula")
        return Score(float(found["same"]), f"{found['said'][:60]}, and {found['right'][:60]} is right")

    return lambda answers: [one(*pair) for pair in zip(answers.responses, answers.records, strict=True)]


def math_fault(term: RewardTerm, record: Mapping[str, Any]) -> str:
    """Return why math-verify cannot parse the reference answer, or ""."""
    field = term.field or "answer"
    value = record.get(field)
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        return f"has no reference answer for math in {field!r}"
    found = _math_process(term.seconds or SECONDS).compare(str(value), None, bare=False)
    why = found.reason if isinstance(found, Score) else "" if found["right"] is not None else "no formula"
    return f"has a reference answer in {field!r} that math-verify cannot parse ({why})" if why else ""


def code_grader(term: RewardTerm, key: str, pattern: re.Pattern[str] | None) -> Grade:
    """Raise EnvironmentFault if this machine does not support the sandbox."""
    if why := confined.can_confine():
        fix = "run them on your own server (put its address into grpo.rewards)"
        raise EnvironmentFault(Fault(key, f"programs cannot be sandboxed here: {why}", fix, code="SF-REWARD"))
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
    """Return 1 if the program passes all tests.

    seconds: of CPU time.
    on_the_clock: wall time limit in seconds; None: a multiple of `seconds` for busy machines.

    Raises EnvironmentFault if the process cannot enter the sandbox.
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
        return Score(math.nan, f"the program did not finish within {error.timeout:g} s of wall time", "timed_out")
    except OSError as error:
        return Score(math.nan, f"the program could not be started: {error}", "raised")
    try:
        said = json.loads(done.stdout)
    except ValueError:
        said = {}
    if isinstance(said, dict) and "refused" in said and done.returncode == 0 and "word" not in said:
        what = f"the program could not be sandboxed: {said['refused']}"
        raise EnvironmentFault(Fault("grpo.rewards", what, "use another machine or container", code="SF-REWARD"))
    if not isinstance(said, dict) or said.get("word") != word:
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Score(0.0, f"the program exceeded {seconds} s of CPU time, or its memory limit")
        return Score(0.0, f"the program {_ending(done.returncode)} before its tests were done")
    passed, count = said["passed"], len(tests)
    return Score(float(passed == count), f"{passed} of {count} tests pass{'; ' if said['why'] else ''}{said['why']}")


def tests_in(record: Mapping[str, Any], field: str) -> list[str]:
    """Return the tests: a text is one test, a list of texts several."""
    value = record.get(field)
    given = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return [one for one in given if isinstance(one, str) and one.strip()] if given else []


def code_fault(term: RewardTerm, record: Mapping[str, Any]) -> str:
    field = term.field or TESTS
    return "" if tests_in(record, field) else f"has no tests for code in {field!r}"


def _environment() -> dict[str, str]:
    """Return an environment without this process's variables, which may contain keys."""
    return {"PATH": os.defpath, "PYTHONHASHSEED": "0"}


def _ending(code: int) -> str:
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
