"""A trial in a child process: started, limited in time, its answer read."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from surefoot.stages.trial import Trial

_TRIAL = TypeAdapter(Trial)
_OUT_OF_MEMORY = (-signal.SIGKILL, 128 + signal.SIGKILL)  # how the kernel ends a process that takes too much


@dataclass(frozen=True)
class Answer:
    """trial: None where there is none; then failure says why."""

    trial: Trial | None
    failure: str = ""


def attempt(config: Mapping[str, Any], *, steps: int, rounds: int, limit: float | None) -> Answer:
    """config: plain values. limit: seconds after which the child is killed."""
    child = subprocess.Popen(
        [sys.executable, "-m", "surefoot.tune.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
    )
    request = json.dumps({"config": config, "steps": steps, "rounds": rounds})
    try:
        out, said = child.communicate(request, timeout=limit)
    except subprocess.TimeoutExpired:
        return Answer(None, f"not done after {limit:.0f} s")
    finally:
        if child.poll() is None:
            child.kill()
            child.communicate()
    if child.returncode in _OUT_OF_MEMORY:
        return Answer(None, "killed, as the system does to what takes too much memory")
    if child.returncode:
        last = (said.strip().splitlines() or ["no word"])[-1]
        return Answer(None, f"broke off with exit code {child.returncode}: {last}")
    answer = json.loads(out)
    if "error" in answer:
        return Answer(None, answer["error"])
    return Answer(_TRIAL.validate_python(answer["trial"]))
