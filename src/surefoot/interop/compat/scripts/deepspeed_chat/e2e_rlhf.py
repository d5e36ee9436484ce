#!/usr/bin/env python3
"""DeepSpeed-Chat's three steps in one go: `e2e_rlhf.py --actor-model 1.3b --reward-model 350m`.

Each step is the script that its words name. Started again, every step goes on where it stopped.
"""

import os
import subprocess
import sys
from pathlib import Path

from surefoot.interop.deepspeed_chat.pipeline import ROWS, runs_of
from surefoot.interop.settings import asks_for_help, described
from surefoot.system.errors import SurefootError


def run_all(words: list[str]) -> int:
    """The exit code of the step that failed, else 0."""
    if asks_for_help(words):
        print("e2e_rlhf.py: one script after another, one for each step. Its flags, with their defaults:")
        for flag, about in described(ROWS):
            print(f"  {flag:32} {about}")
        return 0
    here = Path(__file__).resolve().parent
    for run in runs_of(words):
        missing = [folder for folder in run.needs if not Path(folder, "config.json").is_file()]
        if missing:
            print(f"error: step {run.step}: {missing[0]} holds no model; run --step 1 2 first", file=sys.stderr)
            return 2
        print(f"--- step {run.step}: {run.script}", flush=True)
        words = ["bash", str(here / run.script), *run.arguments]
        if code := subprocess.run(words, env={**os.environ, **run.environment}, check=False).returncode:
            return code
    return 0


if __name__ == "__main__":
    try:
        sys.exit(run_all(sys.argv[1:]))
    except SurefootError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
