"""Run trials, each in its own process, so that each has its own memory peak.

`python -m surefoot.commands.tune.worker [fork]`

stdin: one line of JSON per trial, {"number": …, "config": plain values, "steps": …, "rounds": …, "rival": …,
"clock": …}. stdout: one line of JSON per trial, with its number: {"trial": …}, {"error": sentence, "code": the
fault's}, or {"ended": exit code}; a process that is killed between its answer and its end leaves both. Output of
libraries goes to stderr. With `fork` the libraries, most of the cost of a short trial, are imported once, and every
trial is a fork of this process. Without it this process runs a single trial: a GPU must not be used before a fork.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any, TextIO

from surefoot.config.load import check_config
from surefoot.runs.trial import Rival, run_trial
from surefoot.system import process
from surefoot.system.errors import SurefootError


def main() -> None:
    process.end_with(os.getppid())
    # Libraries, also native ones, print to file descriptor 1, where their lines would corrupt the JSON answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        for line in sys.stdin:
            requested = json.loads(line)
            if "fork" not in sys.argv[1:]:
                _answer(requested, out)
                return
            if code := _in_a_copy(requested, out):
                _say(requested, {"ended": code}, out)


def _in_a_copy(requested: dict[str, Any], out: TextIO) -> int:
    """Return the exit code of the forked process, negative after a signal."""
    here = os.getpid()
    copy = os.fork()
    if copy:
        return os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
    process.end_with(here)
    _answer(requested, out)
    os._exit(0)  # skip the libraries' exit handlers, which could change the exit code


def _answer(requested: dict[str, Any], out: TextIO) -> None:
    rival = requested["rival"]
    try:
        trial = run_trial(
            check_config(requested["config"]),
            steps=requested["steps"],
            rounds=requested["rounds"],
            rival=Rival(tuple(rival["seconds"]), rival["margin"]) if rival else None,
            clock=requested["clock"],
        )
        _say(requested, {"trial": asdict(trial)}, out)
    except SurefootError as error:
        first = error.faults[0]
        _say(requested, {"error": str(first), "code": first.code}, out)


def _say(requested: dict[str, Any], answer: dict[str, Any], out: TextIO) -> None:
    out.write(json.dumps({"number": requested["number"], **answer}) + "\n")
    out.flush()


if __name__ == "__main__":
    main()
