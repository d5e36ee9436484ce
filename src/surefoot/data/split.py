"""Hold examples out for evaluation: only when asked, and the same ones for the same seed."""

from __future__ import annotations

import numpy as np

from surefoot.data.order import HELD_OUT, permutation
from surefoot.errors import Fault, InputError


def split(count: int, held_out: int | float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices to train on and indices to evaluate on, each ascending.

    held_out: a number of examples (int), or a share between 0 and 1 (float), rounded, at least one. InputError
    (data.eval) when nothing would be left to train on.
    """
    wanted = held_out if isinstance(held_out, int) else max(1, round(held_out * count))
    if wanted >= count:
        what = f"{held_out} holds out {wanted} of {count} examples, which leaves none to train on"
        raise InputError(Fault("data.eval", what, f"hold out fewer than {count}, or name a file"))
    order = permutation(seed, (HELD_OUT,), count)
    return np.sort(order[wanted:]), np.sort(order[:wanted])
