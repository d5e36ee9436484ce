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
    same = step_tokens(Examples([50] * 100), 1, 16, Layout(0, tokens=400))
    assert same.padded == same.real == same.shared
    mixed = Examples([10, 20] * 50)
    whole, less = (step_tokens(mixed, 1, 16, Layout(0, tokens=room)) for room in (10_000, 60))
    assert 1 - whole.real / whole.padded == pytest.approx(0.25, abs=0.05)  # all beside the longest: a quarter
    assert less.padded - less.real < (whole.padded - whole.real) / 2  # micro-batches of neighbours waste less


def test_pairs_are_two_rows_whose_beginning_counts_once():
    pairs = Examples([30, 20] * 8, prompt=16)
    found = step_tokens(pairs, 2, 4, Layout(0, most=2))
    steps = 64
    assert found.real == steps * 4 * 50
    assert found.padded == steps * 4 * 60
    assert found.shared == steps * 4 * (16 + 2 * 14)
    short = step_tokens(Examples([30, 20] * 8, prompt=2), 2, 4, Layout(0, most=2))
    assert short.shared == short.padded  # too little to be worth a second pass
