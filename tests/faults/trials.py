"""Many trials of one kind of fault, each with a seed that was drawn anew and is printed where it fails."""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.records import Record, add
from helpers.fork_server import ForkServer


@dataclass
class Trial:
    """seed: makes it again. folder: its own, not there yet. draw: by the seed. The others are for its `Record`."""

    seed: int
    folder: Path
    row: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    longest: dict[str, float] = field(default_factory=dict)
    drawn: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)


def fresh_seed() -> int:
    return random.SystemRandom().randrange(10**9)


def processor_seconds() -> float:
    """Of this process and of the commands that it has had run."""
    return time.process_time() + ForkServer.seconds


def many(what: str, count: int, trial: Callable[[Trial], str], folder: Path, seed: int | None = None) -> list[str]:
    """Make so many trials, each of which returns "" or what went wrong; returns that, with the seed that makes it
    again."""
    started, wrong, first = processor_seconds(), [], fresh_seed() if seed is None else seed
    for number in range(count):
        before, one = processor_seconds(), Trial(first + number, folder / f"trial-{number}")
        found = trial(one)
        seconds = round(processor_seconds() - before, 3)
        add(Record(what, one.row, one.seed, seconds, found, 1, dict(one.counts), one.longest, one.drawn))
        if found:
            wrong.append(f"seed {one.seed}: {found}")
        else:
            shutil.rmtree(one.folder, ignore_errors=True)
    minutes = (processor_seconds() - started) / 60
    print(f"{what}: {count} trials, {len(wrong)} wrong, seeds from {first}, {minutes:.2f} processor minutes")
    return wrong
