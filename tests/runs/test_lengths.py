"""What each way to lay out a step sends through the model, counted."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from surefoot.data.batching.packing import Layout
from surefoot.runs.plan_with_data import step_tokens


class Examples:
    """Just what is counted: pairs that begin with the same `prompt` tokens."""

    def __init__(self, lengths, prompt: int = 0):
        self.lengths, self.prompt = np.array(lengths), prompt

    def __getitem__(self, place):
        ids = np.arange(self.lengths[place])
        ids[self.prompt :] += 1000 * (place % 2)
        return SimpleNamespace(ids=ids)


def test_the_share_of_padding():
    real, padded, shared = step_tokens(Examples([50] * 100), 1, 16, Layout(0, tokens=400))
    assert padded == real == shared
    mixed = Examples([10, 20] * 50)
    (real, whole, _), (_, less, _) = (step_tokens(mixed, 1, 16, Layout(0, tokens=room)) for room in (10_000, 60))
    assert 1 - real / whole == pytest.approx(0.25, abs=0.05)  # all beside the longest: a quarter
    assert less - real < (whole - real) / 2  # micro-batches of neighbours waste less


def test_pairs_are_two_rows_whose_beginning_counts_once():
    pairs = Examples([30, 20] * 8, prompt=16)
    steps = 64
    assert step_tokens(pairs, 2, 4, Layout(0, most=2)) == (steps * 4 * 50, steps * 4 * 60, steps * 4 * (16 + 2 * 14))
    _, padded, shared = step_tokens(Examples([30, 20] * 8, prompt=2), 2, 4, Layout(0, most=2))
    assert shared == padded  # too little to be worth a second pass
