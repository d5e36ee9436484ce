"""Many trials of one kind of fault, each with a seed that was drawn anew and is printed where it fails."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path


def fresh_seed() -> int:
    return random.SystemRandom().randrange(10**9)


def many(
    what: str, count: int, trial: Callable[[random.Random, Path], str], folder: Path, seed: int | None = None
) -> list[str]:
    """Run `trial(draw, its folder)` so often; returns what went wrong, with the seed that makes it again."""
    started, wrong, first = time.monotonic(), [], fresh_seed() if seed is None else seed
    for number in range(count):
        place = folder / f"trial-{number}"
        found = trial(random.Random(first + number), place)
        if found:
            wrong.append(f"seed {first + number}: {found}")
        else:
            shutil.rmtree(place, ignore_errors=True)
    minutes = (time.monotonic() - started) / 60
    print(f"{what}: {count} trials, {len(wrong)} wrong, seeds from {first}, {minutes:.2f} minutes")
    return wrong
