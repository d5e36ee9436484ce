"""The two tiers of the suite: the cases of a matrix that `make test` runs, and the rest, which `make test-long` adds.

@pytest.mark.parametrize("engine", representatives(ENGINES, "ddp"))
@pytest.mark.parametrize(("stage", "adapter"), representatives(CASES, ("sft", "lora")))
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def representatives(cases: Iterable[Any], *chosen: Any) -> list[Any]:
    """Return all cases as parameters; those that are not chosen are marked `slow`."""
    cases = list(cases)
    assert all(one in cases for one in chosen), f"no case of this matrix: {[one for one in chosen if one not in cases]}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.slow)
        for case in cases
    ]


def diagonal(rows: Iterable[Any], columns: Iterable[Any]) -> list[Any]:
    """Return all pairs as parameters; representatives are one per row, with the columns in turn."""
    rows, columns = list(rows), list(columns)
    chosen = ((row, columns[number % len(columns)]) for number, row in enumerate(rows))
    return representatives(product(rows, columns), *chosen)
