"""Which examples are exact copies of others, in one file, across files, and in what is evaluated."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from surefoot.data.dataset import TokenisedDataset
from surefoot.data.kind import Kind, rows_per_item

NONE = np.zeros(0, dtype=np.int64)  # no item


def item_prints(dataset: TokenisedDataset, kind: Kind) -> np.ndarray:
    """Of every item, see `TokenisedDataset.fingerprints`: of pairs one for both, of judged answers with the verdict.
    [items] of plain bytes."""
    prints = dataset.fingerprints()
    columns = prints.view(np.uint8).reshape(len(prints) // rows_per_item(kind), -1)
    if kind == "judged":
        columns = np.column_stack([columns, dataset.good()])
    return np.ascontiguousarray(columns).view(f"V{columns.shape[1]}").ravel()


def copies_in(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of each part which of its items, by index, were there before, in it or in an earlier one."""
    lengths = [len(part) for part in parts]
    again = np.ones(sum(lengths), dtype=bool)
    if len(again):
        again[np.unique(np.concatenate(parts), return_index=True)[1]] = False
    return [np.flatnonzero(part) for part in np.split(again, np.cumsum(lengths)[:-1])]
