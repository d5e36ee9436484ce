"""Packed rows hold the step whatever their size, waste nothing, and carry what padded rows carry."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.toy_model import toy_examples
from surefoot.data.batching.batch import Example, collate, documents_at, in_rows, pack, position_ids, unpacked
from surefoot.data.batching.loader import packed_in_turn, packed_rows, padded_rows

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


@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 9))
def test_a_whole_data_set_fills_rows_in_one_pass(lengths, budget, most):
    rows = packed_in_turn(lengths, budget, most=most)
    assert [lengths[place] for row in rows for place in row] == sorted(lengths, reverse=True)
    assert sorted(place for row in rows for place in row) == list(range(len(lengths)))
    sizes = [sum(lengths[place] for place in row) for row in rows]
    assert all(size <= budget or len(row) == 1 for size, row in zip(sizes, rows, strict=True))
    assert all(len(row) <= (most or len(row)) for row in rows)
    for row, following in itertools.pairwise(rows):  # no row ends early
        assert len(row) == most or sum(lengths[place] for place in [*row, following[0]]) > budget


def test_what_tokens_have_is_laid_out_as_padding_does():
    examples = toy_examples(7)
    padded, packed = collate(examples, 0), pack(examples)
    assert torch.equal(in_rows(packed.input_ids, packed), padded.input_ids)
    assert in_rows(padded.input_ids, padded) is padded.input_ids
    assert (packed.sequences, packed.blank().sequences, padded.sequences) == (7, 7, 7)


def test_some_documents_of_a_row():
    examples = toy_examples(5)
    part = documents_at(pack(examples), [3, 1])
    alone = pack([examples[3], examples[1]])
    assert torch.equal(part.input_ids, alone.input_ids)
    assert torch.equal(part.targets, alone.targets)
    assert (part.weight, part.documents, part.examples) == (alone.weight, alone.documents, alone.examples)
