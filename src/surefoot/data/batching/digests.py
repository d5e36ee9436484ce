"""Digests of examples, by which what is stored about them is found: of the token ids and of which are learned, so
nothing can be found for another example, whatever the step, order or batch."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np

from surefoot.data.batching.batch import Batch, Example, in_rows, next_tokens

SIZE = 16  # bytes of a digest


def example_digest(example: Example) -> bytes:
    """Return the digest of one example; `row_digests` gives the same in a batch."""
    return _digest(example.ids.astype(np.int64), next_tokens(example).astype(np.int64))


def row_digests(rows: Batch) -> list[bytes]:
    """Return the digest of each example, of packed or padded rows. The host waits for rows on a GPU; see `digested`."""
    if rows.digests:
        return [bytes.fromhex(one) for one in rows.digests]
    ids, targets = (in_rows(one, rows).cpu().numpy() for one in (rows.input_ids, rows.targets))
    return [_digest(ids[row, :length], targets[row, :length]) for row, length in enumerate(rows.lengths)]


def digested(rows: Batch) -> Batch:
    """Return the rows with their digests, which they keep on another device."""
    return replace(rows, digests=tuple(one.hex() for one in row_digests(rows)))


def _digest(ids: np.ndarray, targets: np.ndarray) -> bytes:
    return hashlib.blake2b(ids.tobytes() + targets.tobytes(), digest_size=SIZE).digest()
