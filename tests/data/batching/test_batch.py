"""Digests of examples: the same however they are laid out, and never those of others."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch

from surefoot.data.batching.batch import Example, digested, example_digest, row_digests, unpacked
from surefoot.data.batching.loader import Layout, to_batch
from surefoot.data.batching.subsets import part_within, shortest

ROWS = [
    Example(np.arange(5, 5 + length), np.arange(length) >= prompt, number)
    for number, (length, prompt) in enumerate([(9, 3), (4, 1), (9, 5)])
]


@pytest.mark.parametrize("packed", [False, True])
def test_rows_have_the_digests_of_their_examples_in_every_layout(packed):
    rows = to_batch(ROWS, Layout(0, packed=packed))
    wanted = [example_digest(one) for one in ROWS]
    assert row_digests(rows) == row_digests(digested(rows)) == row_digests(unpacked(rows, 0)) == wanted
    ids, targets = np.arange(5, 9), [6, 7, 8, -100]
    content = ids.astype(np.int64).tobytes() + np.array(targets, np.int64).tobytes()
    assert wanted[1] == hashlib.blake2b(content, digest_size=16).digest()
    assert len(set(wanted)) == 3  # of equal ids, other ones are learned


@pytest.mark.parametrize("packed", [False, True])
def test_a_part_of_the_rows_has_no_others(packed):
    rows = digested(to_batch(ROWS, Layout(0, packed=packed)))
    for part in (shortest(rows, 1), part_within(rows, 9)):
        assert row_digests(part) == [example_digest(ROWS[int(number)]) for number in part.examples]


def test_they_are_kept_on_another_device():
    rows = digested(to_batch(ROWS, Layout(0)))
    assert row_digests(rows.to(torch.device("meta"))) == row_digests(rows)
    with pytest.raises(NotImplementedError):  # the twin: without them the host asks the device
        row_digests(replace(rows, digests=()).to(torch.device("meta")))
