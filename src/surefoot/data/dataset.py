"""A tokenised data set: four arrays, usually memory-mapped, and a choice of examples among them.

A row costs microseconds and no copy until it is asked for. Row numbers and lines of the source file are kept, so that
a log or an error can name the record it means.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from surefoot.data.batch import Example

TRUNCATED, PROMPT_LOST, STOP_LOST, CONTROL_TEXT = 1, 2, 4, 8  # bits of `flags`


@dataclass(frozen=True)
class TokenisedDataset:
    """N examples chosen from M that lie one after the other.

    ids[tokens] (uint16 or uint32), mask[tokens] (bool), offsets[M + 1], rows[M, 3]: number, line and flags of each
    example. chosen[N]: which of the M these are.
    """

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray
    chosen: np.ndarray

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> Example:
        """Example.number is the number of the record in its file, from 1."""
        place = self.chosen[index]
        part = slice(self.offsets[place], self.offsets[place + 1])
        return Example(self.ids[part].astype(np.int64), np.array(self.mask[part]), int(self.rows[place, 0]))

    def length(self, index: int) -> int:
        """Tokens of one example."""
        return int(self.lengths[index])

    def supervised(self, index: int) -> int:
        """Tokens of one example that carry loss."""
        place = self.chosen[index]
        return int(self.mask[self.offsets[place] : self.offsets[place + 1]].sum())

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of every example: [N] int64."""
        return np.diff(self.offsets)[self.chosen]

    def fingerprint(self, index: int) -> bytes:
        """Equal for two examples with the same ids and the same mask, also of different data sets of one tokenizer."""
        place = self.chosen[index]
        part = slice(self.offsets[place], self.offsets[place + 1])
        return hashlib.blake2b(self.ids[part].tobytes() + self.mask[part].tobytes(), digest_size=16).digest()

    def line(self, index: int) -> int:
        """Where the record starts in its file."""
        return int(self.rows[self.chosen[index], 1])

    def flags(self) -> np.ndarray:
        """TRUNCATED, PROMPT_LOST, STOP_LOST and CONTROL_TEXT of every example: [N]."""
        return self.rows[self.chosen, 2]

    def subset(self, indices: Sequence[int] | np.ndarray) -> TokenisedDataset:
        """These examples, in this order, over the same arrays."""
        return replace(self, chosen=self.chosen[np.asarray(indices, dtype=np.int64)])
