"""`python -m surefoot.tune.worker`: one trial in a process of its own, so that its peak of memory is its own.

stdin: {"config": plain values, "steps": …, "rounds": …} as JSON. stdout: one line of JSON, {"trial": …} or
{"error": sentence}; whatever libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict

from surefoot.config.load import check_config
from surefoot.errors import SurefootError
from surefoot.stages.trial import run_trial


def main() -> None:
    asked = json.load(sys.stdin)
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        trial = run_trial(check_config(asked["config"]), steps=asked["steps"], rounds=asked["rounds"])
        answer = {"trial": asdict(trial)}
    except SurefootError as error:
        answer = {"error": str(error.faults[0]) if error.faults else str(error)}
    with os.fdopen(answers, "w", encoding="utf-8") as out:
        out.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
