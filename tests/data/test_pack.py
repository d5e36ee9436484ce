"""Packed rows hold the step whatever their size, waste nothing, and carry what padded rows carry."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surefoot.data.batch import Example, collate
from surefoot.data.pack import pack, packed_rows, padded_rows, padding_share, position_ids, unpacked
from toy import toy_examples

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 9), st.integers(1, 4))
def test_every_example_stands_in_one_row_within_the_budget(lengths, budget, most, multiple):
    rows = packed_rows(lengths, budget, most=most, multiple=multiple)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    sizes = [sum(lengths[place] for place in row) for row in rows]
    assert all(size <= max(budget, max(lengths)) for size in sizes)
    assert sizes == sorted(sizes, reverse=True)
    assert all(len(row) <= (most or len(row)) for row in rows)
    for row in rows:
        own = [lengths[place] for place in row]
        assert own == sorted(own, reverse=True)


@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 9))
def test_padded_rows_too(lengths, budget, most):
    rows = padded_rows(lengths, budget, most=most)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or len(row) * lengths[row[0]] <= budget
        assert len(row) <= (most or len(row))
    firsts = [lengths[row[0]] for row in rows]
    assert firsts == sorted(firsts, reverse=True)


def test_rows_are_about_equally_long_and_as_few_as_can_be():
    lengths = [500, 400, 300, 300, 200, 100, 100, 60, 40]
    rows = packed_rows(lengths, 1024)
    assert [sum(lengths[place] for place in row) for row in rows] == [1000, 1000]
    rows = packed_rows([10] * 9, 40)
    assert [len(row) for row in rows] == [3, 3, 3]  # and not 4, 4, 1


def test_ranks_get_as_many_rows_each():
    assert len(packed_rows([10] * 9, 90)) == 1
    assert [len(row) for row in packed_rows([10] * 9, 90, multiple=2)] == [5, 4]
    assert len(packed_rows([10], 90, multiple=2)) == 1  # one example: there is nothing to share


def test_a_packed_row_by_hand():
    first = Example(np.array([5, 6, 7]), np.array([False, True, True]), 1)
    second = Example(np.array([8, 9]), np.array([True, True]), "b.json:2")
    row = pack([first, second])
    assert row.input_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert row.targets.tolist() == [[6, 7, -100, 9, -100]]  # 8 begins a document: nothing before it predicts it
    assert row.attention_mask is None
    assert (row.weight, row.tokens, row.lengths, row.documents) == (3, 5, (3, 2), (3, 2))
    assert row.examples == (1, "b.json:2")
    assert position_ids(row.documents, torch.device("cpu")).tolist() == [[0, 1, 2, 0, 1]]
    blank = row.blank()
    assert (blank.weight, blank.tokens, blank.examples, blank.documents) == (0, 0, (), (3, 2))


def test_unpacked_it_is_what_padding_makes():
    examples = toy_examples(7)
    wanted, found = collate(examples, 3), unpacked(pack(examples), 3)
    assert torch.equal(found.input_ids, wanted.input_ids)
    assert torch.equal(found.targets, wanted.targets)
    assert (found.weight, found.lengths, found.examples) == (wanted.weight, wanted.lengths, wanted.examples)
    assert found.documents == ()
    assert unpacked(wanted, 3) is wanted


def test_the_share_of_padding():
    same = np.full(100, 50)
    assert padding_share(same, size=16, budget=400) == 0.0
    half = np.array([10, 20] * 50)
    wasted = padding_share(half, size=16, budget=10_000)  # all of a step beside its longest: a quarter is padding
    assert wasted == pytest.approx(0.25, abs=0.05)
    assert padding_share(half, size=16, budget=60) < wasted / 2  # smaller micro-batches of neighbours waste less
