"""math-verify and unit tests of generated programs, each in a process of its own."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from helpers.faults import gives, raises_fault
from surefoot.config.load import load_config
from surefoot.config.methods import RewardTerm
from surefoot.methods.rewards import confined, in_children
from surefoot.methods.rewards.answers import Answers
from surefoot.methods.rewards.graders import expected_fault
from surefoot.methods.rewards.in_children import MathProcess, run_program
from surefoot.methods.rewards.terms import open_rewards
from surefoot.system.errors import EnvironmentFault, InputError


def graded(term: dict, *pairs: tuple[str, dict]):
    count = len(pairs)
    (reward,) = open_rewards([RewardTerm(**term)])
    words, records = zip(*pairs, strict=True)
    return reward.grade(Answers([""] * count, words, [(1,)] * count, records, [True] * count))


def by_math(*pairs: tuple[str, str], **keys):
    pytest.importorskip("math_verify")
    return graded({"name": "math", **keys}, *((answer, {"answer": right}) for right, answer in pairs))


def test_math_by_value_and_not_by_text():
    found = by_math(
        ("\\frac{1}{2}", "so it is $0.5$"),
        ("x^2+1", "\\boxed{1+x^2}"),
        ("(1,2]", "The interval $(1, 2]$."),
        ("3", "$x = 4$"),
        ("3", "I do not know"),
    )
    assert [one.value for one in found] == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert all(one.outcome == "scored" and one.reason for one in found)


def test_math_compares_what_the_pattern_finds():
    found = by_math(("7", "<a>7</a> or 8"), ("7", "7"), pattern="<a>(.*)</a>")
    assert [one.value for one in found] == [1.0, 0.0]


def test_math_needs_no_signals_of_the_main_thread():
    """verl#5635: signal.alarm in a worker. The twin is math-verify itself, called in the same thread."""
    pytest.importorskip("math_verify")
    from math_verify import parse

    found: dict[str, object] = {}

    def work() -> None:
        found["ours"] = [one.value for one in by_math(("1/2", "$0.5$"))]
        try:
            found["alarm"] = parse("$0.5$")
        except ValueError:
            found["alarm"] = []

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == {"ours": [1.0], "alarm": []}


def test_math_that_takes_too_long_has_no_score_and_the_next_answer_has_one():
    pytest.importorskip("math_verify")
    process = MathProcess(limit=20.0)
    assert process.compare("1", "$1$", bare=False)["same"]
    process._process.send_signal(signal.SIGSTOP)  # the twin: the same question, and no answer
    process._limit = 0.01
    late = process.compare("1", "$1$", bare=False)
    assert (late.outcome, math.isnan(late.value)) == ("timed_out", True)
    process._limit = 20.0
    assert process.compare("1", "$1$", bare=False)["same"]
    process._process.kill()
    process._process.wait()
    assert process.compare("1", "$1$", bare=False)["same"]  # another one is begun
    process.end()


def test_math_of_a_process_that_dies_is_lost(monkeypatch, tmp_path):
    (tmp_path / "dies.py").write_text("import os, sys; sys.stdin.readline(); os._exit(7)")
    monkeypatch.setattr(in_children, "_FILE", str(tmp_path / "dies.py"))
    found = MathProcess(limit=20.0).compare("1", "$1$", bare=False)
    assert (found.outcome, math.isnan(found.value)) == ("raised", True)


def test_math_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(in_children.importlib.util, "find_spec", lambda name: None)
    with raises_fault("SF-PACKAGE", "grpo.rewards[0].name"):
        open_rewards([RewardTerm(name="math")])


@pytest.mark.parametrize(
    ("name", "record"), [("math", {}), ("math", {"answer": " "}), ("code", {}), ("code", {"tests": []})]
)
def test_records_without_a_right_answer_are_told(name, record):
    pytest.importorskip("math_verify")
    assert expected_fault(RewardTerm(name=name), record)
    assert not expected_fault(RewardTerm(name=name), {"answer": "1/2", "tests": ["assert f(1) == 1"]})


needs_filter = pytest.mark.skipif(bool(confined.can_confine()), reason="Linux on x86-64 confines programs")
GOOD = "def f(x):\n    return x + 1\n"
TESTS = ["assert f(1) == 2", "assert f(2) == 3"]


@needs_filter
def test_programs_are_scored_by_all_of_their_tests():
    fenced = f"Here:\n```python\ndef f(x): return 0\n```\nBetter:\n```python\n{GOOD}```\nDone."
    found = graded({"name": "code"}, (fenced, {"tests": TESTS}), (GOOD, {"tests": "\n".join(TESTS)}))
    assert [one.value for one in found] == [1.0, 1.0]
    half = run_program(GOOD, [*TESTS, "assert f(3) == 3"], 2)
    assert (half.value, half.reason.startswith("2 of 3 ")) == (0.0, True)


FORBIDDEN = {
    "network": "import socket; socket.socket()",
    "process": "import os; os.fork()",
    "program": "import os; os.execv('/bin/true', ['true'])",
    "thread": "import threading; threading.Thread(target=print).start()",
    "new file": "open('NEW', 'w')",
    "changed file": "open('OLD', 'r+')",
    "no file": "import os; os.remove('OLD')",
    "signal": "import os; os.kill(os.getppid(), 9)",
    "waiting": "import time; time.sleep(60)",
    "memory": "x = bytearray(8 << 30)",
    "limits": "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
}


@needs_filter
@pytest.mark.parametrize("what", FORBIDDEN)
def test_a_confined_program_can_not(what, tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("as it was")
    program = FORBIDDEN[what].replace("OLD", str(old)).replace("NEW", str(new))
    found = run_program(program, ["pass"], 5)
    assert (found.value, found.reason.startswith("0 of 1 ")) == (0.0, True)
    assert gives(found.reason, "raised")
    assert (old.read_text(), new.exists()) == ("as it was", False)


@needs_filter
@pytest.mark.parametrize("what", ["network", "new file", "no file", "waiting"])
def test_twin_unconfined_it_could(what, tmp_path, monkeypatch):
    """The same programs where `confine` does nothing: the tests above would notice."""
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("as it was")
    file = tmp_path / "open.py"
    file.write_text(
        Path(confined.__file__).read_text().replace("        confine(MEMORY", "        (lambda *of: 0)(MEMORY")
    )
    monkeypatch.setattr(in_children, "_FILE", str(file))
    program = FORBIDDEN[what].replace("OLD", str(old)).replace("NEW", str(new)).replace("(60)", "(0)")
    assert run_program(program, ["pass"], 5).value == 1.0


@needs_filter
def test_an_endless_program_fails_and_one_that_got_no_time_has_no_score():
    endless = run_program("while True: pass", ["pass"], 1)
    assert (endless.value, endless.outcome) == (0.0, "scored")
    starved = run_program(GOOD, TESTS, 5, on_the_clock=1e-6)
    assert (starved.outcome, math.isnan(starved.value)) == ("timed_out", True)


@needs_filter
@pytest.mark.parametrize("program", ["import os; os._exit(0)", "import sys; sys.exit(0)", "raise SystemExit"])
def test_a_program_that_leaves_early_has_not_passed(program):
    assert run_program(program, ["pass"], 5).value == 0.0


@needs_filter
def test_a_program_sees_no_variable_of_this_process(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    test = "import os\nassert 'HF_TOKEN' not in os.environ"
    assert run_program("", [test], 5).value == 1.0
    assert (
        "secret"
        in subprocess.run([sys.executable, "-c", "import os; print(os.environ)"], capture_output=True, text=True).stdout
    )


def test_where_nothing_can_be_confined_no_program_runs(monkeypatch):
    monkeypatch.setattr(confined.platform, "machine", lambda: "riscv64")
    with pytest.raises(EnvironmentFault) as caught:
        open_rewards([RewardTerm(name="code")])
    assert caught.value.faults[0].code == "SF-REWARD"


@needs_filter
def test_a_kernel_that_refuses_the_filter_ends_the_run(monkeypatch, tmp_path):
    file = tmp_path / "refused.py"
    file.write_text(
        Path(confined.__file__)
        .read_text()
        .replace("_SECCOMP, _FILTER, _END", "_SECCOMP, _FILTER, _END", 1)
        .replace("= 38, 22, 2, 1", "= 38, 9999, 2, 1")
    )
    monkeypatch.setattr(in_children, "_FILE", str(file))
    with pytest.raises(EnvironmentFault):
        run_program(GOOD, TESTS, 5)


def test_code_is_refused_unless_it_is_allowed(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("{}")
    keys = {"model": str(tmp_path / "base"), "data": {"train": str(tmp_path / "data.jsonl")}}
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps({"stage": "grpo", **keys, "output": "o", "grpo": {"rewards": ["code"]}}))
    with pytest.raises(InputError) as caught:
        load_config(path, [])
    assert (caught.value.faults[0].code, "grpo.run_code" in str(caught.value)) == ("SF-CONFIG-CONFLICT", True)
    load_config(path, ["grpo.run_code=true"])
