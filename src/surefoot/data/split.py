"""Parts of the records: held out for evaluation, or shared out among runs. Only when asked, and the same ones for the
same seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surefoot.data.mixture import apportion
from surefoot.data.order import HELD_OUT, SHARES, permutation
from surefoot.system.errors import Fault, InputError


def split(counts: Sequence[int], held_out: int | float, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each source the places to train on and the places to evaluate on, each ascending.

    counts: records of each source, which are held out in proportion; one of each stays. held_out: a number of records
    in all (int), or a share between 0 and 1 (float), rounded, at least one. InputError (data.eval) when nothing would
    be left to train on.
    """
    total = sum(counts)
    wanted = held_out if isinstance(held_out, int) else max(1, round(held_out * total))
    most = [count - 1 for count in counts]
    if wanted > sum(most):
        what = f"{held_out} holds out {wanted} of {total} records, which leaves none to train on"
        if len(counts) > 1:
            what += " from some source"
        raise InputError(
            Fault("data.eval", what, f"hold out fewer than {sum(most) + 1}, or name a file", code="SF-DATA-SHARES")
        )
    taken = apportion(wanted, counts, most)
    return [_halves(count, part, seed, source) for source, (count, part) in enumerate(zip(counts, taken, strict=True))]


def _halves(count: int, taken: int, seed: int, source: int) -> tuple[np.ndarray, np.ndarray]:
    order = permutation(seed, (HELD_OUT,) if source == 0 else (HELD_OUT, source), count)
    return np.sort(order[taken:]), np.sort(order[:taken])


def part_of(count: int, of: Sequence[float], take: int, seed: int) -> np.ndarray:
    """Places of the records of part `take` (from 1), ascending. count: records. of: relative sizes of the parts.

    All parts together have every record once, whatever a run learns from its part: they come from one shuffle, which
    depends on the seed and the number of records alone. InputError for a part without a record.
    """
    sizes = apportion(count, of)
    start = sum(sizes[: take - 1])
    if not sizes[take - 1]:
        what = f"gives none of {count} records to part {take} of {','.join(f'{size:g}' for size in of)}"
        raise InputError(Fault("share", what, "raise its size", code="SF-DATA-SHARES"))
    return np.sort(permutation(seed, (SHARES,), count)[start : start + sizes[take - 1]])
