"""The longest sequence of a batch, alone."""

import numpy as np
import pytest
import torch

from surefoot.data.batching.batch import Example, collate, pack
from surefoot.data.batching.subsets import longest_row

LENGTHS = (3, 7, 5)


def examples():
    return [
        Example(np.arange(length) + 10 * length, np.ones(length, dtype=bool), number)
        for number, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("lay_out", [lambda rows: collate(rows, 0), pack], ids=["padded", "packed"])
def test_the_longest_sequence_alone(lay_out):
    found = longest_row(lay_out(examples()))
    assert found.input_ids.tolist() == [list(range(70, 77))]
    assert (found.documents, found.lengths, found.examples) == ((), (7,), (1,))


def test_rows_padded_on_the_left_stay():
    rows = collate(examples(), 0, "left")
    assert longest_row(rows) is rows
    assert torch.equal(longest_row(rows).input_ids, rows.input_ids)
