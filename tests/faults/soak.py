"""The parts of `make soak`: how many trials each of their tests makes.

    make soak                                                  # all of it, about 90 minutes of one processor
    make soak SOAK="--scale 0.01"                              # a hundredth of each part
    make soak SOAK="-k killed --trials 'killed runs=50'"       # one part, so many trials

A test marked `soak("killed runs")` belongs to that part and asks the fixture `trials` how many it is to make; one under
`short_and_soak("killed runs", 3)` makes three in `make test` besides.
"""

from collections.abc import Sequence

import pytest

PARTS = {
    "inputs": 200_000,
    "killed runs": 200,
    "stopped runs": 100,
    "power failures": 500,
    "each operation of a run": 1,
    "mutations": 500,
    "NaN and infinity": 100,
    "failing disks": 60,
    "each write of a run that goes back": 1,
    "gradient spikes": 200,
}


def sizes(scale: float, asked: Sequence[str]) -> dict[str, int]:
    """Trials of each part, at least one. asked: "PART=COUNT". Raises pytest.UsageError for a part that there is not."""
    found = {name: max(1, round(trials * scale)) for name, trials in PARTS.items()}
    for words in asked:
        name, _, count = words.rpartition("=")
        if name not in PARTS or not (count.isascii() and count.isdigit() and int(count)):
            raise pytest.UsageError(f"--trials {words}: give PART=COUNT, where PART is one of {', '.join(PARTS)}")
        found[name] = int(count)
    return found


def short_and_soak(part: str, short: int) -> pytest.MarkDecorator:
    """The same test with `short` trials in the default tier, and with the part's in `make soak`."""
    return pytest.mark.parametrize("trials", [short, pytest.param(None, marks=pytest.mark.soak(part))], indirect=True)
