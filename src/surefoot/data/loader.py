"""The examples of one optimizer step, arranged into micro-batches with little padding.

Sorting by length happens within a step only: which examples a step holds was decided before, and how they are grouped
changes nothing but speed. The longest come first, so a step that does not fit fails at its first micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from surefoot.data.batch import Batch, collate
from surefoot.data.dataset import TokenisedDataset


def micro_batches(
    dataset: TokenisedDataset,
    indices: Iterable[int],
    micro: int,
    pad_id: int,
    side: Literal["left", "right"] = "right",
) -> list[Batch]:
    """Batches of at most `micro` examples each, longest first; examples of one length keep their order."""
    by_length = sorted((int(index) for index in indices), key=dataset.length, reverse=True)
    return [
        collate([dataset[index] for index in by_length[start : start + micro]], pad_id, side)
        for start in range(0, len(by_length), micro)
    ]
