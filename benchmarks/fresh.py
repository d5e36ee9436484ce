"""A measurement in a process of its own: its memory, its clocks and its caches are those of nobody else."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


class BrokeOff(SystemExit):
    """What a command that failed said last. Ends the program, where nobody goes on without it."""


def told_by(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> Any:
    """The JSON on the last line that the command prints. Raises BrokeOff for one that fails."""
    done = subprocess.run(command, capture_output=True, encoding="utf-8", env=environment)
    if done.returncode:
        raise BrokeOff(f"{' '.join(command)[:200]} broke off:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
