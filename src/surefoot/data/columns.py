"""What a start wants to know of every example, counted once: it stands in the cache beside the tokens.

Both are made of ids and labels alone, so they are as true as these are, and the cache's hashes hold all of them
together.
"""

from __future__ import annotations

import hashlib

import numpy as np

from surefoot.data.dataset import TokenisedFile

PRINT = np.dtype("V16")  # BLAKE2b of 16 bytes: two examples of ten million are the same by chance once in 10^25


def with_columns(name: str, ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> TokenisedFile:
    """The file with what is counted of its examples; arrays as in `TokenisedFile`."""
    return TokenisedFile(name, ids, mask, offsets, rows, supervised_of(mask, offsets), prints_of(ids, mask, offsets))


def supervised_of(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Tokens of each example that carry loss: [M] int64."""
    before = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return np.diff(before[offsets])


def prints_of(ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Of each example a hash of its ids, whatever their width, and of its labels: [M] V16."""
    found = bytearray()
    wide, labels = memoryview(ids.astype("<u4").tobytes()), memoryview(mask.tobytes())
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        one = hashlib.blake2b(wide[4 * start : 4 * end], digest_size=PRINT.itemsize)
        one.update(labels[start:end])
        found += one.digest()
    return np.frombuffer(bytes(found), dtype=PRINT)
