"""Tokenized files made from arrays, with the per-example counts that tokenizing adds."""

import numpy as np

from surefoot.data.tokenize.dataset import TokenizedFile, fingerprints_of, supervised_of


def with_columns(name: str, ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray, rows: np.ndarray) -> TokenizedFile:
    """Return a `TokenizedFile` with these arrays."""
    return TokenizedFile(
        name, ids, mask, offsets, rows, supervised_of(mask, offsets), fingerprints_of(ids, mask, offsets)
    )
