"""Many trials of one kind of fault, each with a seed that was drawn anew and is printed where it fails."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Trial:
    """seed: makes it again. folder: its own, not there yet. draw: by the seed."""

    seed: int
    folder: Path

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)


def fresh_seed() -> int:
    return random.SystemRandom().randrange(10**9)


def many(what: str, count: int, trial: Callable[[Trial], str], folder: Path, seed: int | None = None) -> list[str]:
    """Make so many trials, each of which returns "" or what went wrong; returns that, with the seed that makes it
    again."""
    wrong, first = [], fresh_seed() if seed is None else seed
    for number in range(count):
        one = Trial(first + number, folder / f"trial-{number}")
        found = trial(one)
        if found:
            wrong.append(f"seed {one.seed}: {found}")
        else:
            shutil.rmtree(one.folder, ignore_errors=True)
    print(f"{what}: {count} trials, {len(wrong)} wrong, seeds from {first}")
    return wrong
