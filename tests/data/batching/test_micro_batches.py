"""Items stay together, within the budget, whichever way they are laid out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.toy_model import toy_examples
from surefoot.data.batching.batch import IGNORE, DrawnBatch, JudgedBatch, PairBatch
from surefoot.data.batching.loader import Layout, to_batch
from surefoot.data.batching.subsets import end_of_one, in_padded_rows, part_within, shortest, with_fewer_targets

PAIRS = [(5, 9), (3, 3), (8, 2), (4, 6), (10, 1)]


@pytest.mark.parametrize("whole", [False, True])
def test_padded_pairs_count_both_rows_with_their_padding(whole):
    def groups(layout):
        return (layout.groups_of_all if whole else layout.groups)(PAIRS)

    assert groups(Layout(0, most=2)) == [[4, 0], [2, 3], [1]]
    assert groups(Layout(0, tokens=36)) == [[4], [0, 2], [3, 1]]  # 2 rows of 10; 4 of 9; 4 of 6
    assert groups(Layout(0, tokens=1)) == [[4], [0], [2], [3], [1]]
    assert groups(Layout(0)) == [[4, 0, 2, 3, 1]]


def test_packed_pairs_count_real_tokens():
    assert Layout(0, tokens=51, packed=True).groups(PAIRS) == [[0, 4, 2, 3, 1]]
    rows = Layout(0, tokens=30, packed=True).groups(PAIRS)
    assert [sum(sum(PAIRS[place]) for place in row) for row in rows] == [27, 24]
    assert max(map(len, Layout(0, most=2, tokens=100, packed=True).groups(PAIRS))) == 2
    assert len(Layout(0, tokens=100, packed=True, ranks=2).groups(PAIRS)) == 2
    assert Layout(0, tokens=30, packed=True).groups_of_all(PAIRS) == [[0, 4], [2, 3, 1]]


def pairs(layout: Layout, count: int = 4) -> PairBatch:
    examples = toy_examples(2 * count)
    return PairBatch(to_batch(examples, layout), (1,) * count, count, 0.5, torch.arange(2.0 * count))


def same(one, other) -> bool:
    return torch.equal(one.input_ids, other.input_ids) and torch.equal(one.targets, other.targets)


def test_packed_batches_of_every_kind_are_padded_again():
    packed, padded = (pairs(Layout(0, packed=way)) for way in (True, False))
    assert same(in_padded_rows(packed, 0).rows, padded.rows)
    assert in_padded_rows(padded, 0).rows is padded.rows
    examples = toy_examples(4)
    judged = [
        JudgedBatch(to_batch(examples, layout), torch.tensor([True, False] * 2), to_batch(examples[::-1], layout), 4)
        for layout in (Layout(0, packed=True), Layout(0))
    ]
    found = in_padded_rows(judged[0], 0)
    assert same(found.rows, judged[1].rows)
    assert same(found.others, judged[1].others)
    rows = judged[0].rows
    assert same(in_padded_rows(DrawnBatch(rows, rows.weight), 0).rows, judged[1].rows)


def test_a_part_has_whole_pairs_and_costs_no_more_when_padded():
    batch = pairs(Layout(0, packed=True), 6)
    part = part_within(batch, batch.rows.input_ids.numel())
    count = part.weight
    assert 1 <= count < 6
    assert len(part.rows.documents) == 2 * count == 2 * len(part.common)
    assert part.examples == part.rows.examples[:count]
    wanted = [batch.rows.examples.index(number) for number in part.rows.examples]
    assert part.reference.tolist() == [float(place) for place in wanted]
    assert wanted[count:] == [place + 6 for place in wanted[:count]]
    assert in_padded_rows(part, 0).rows.input_ids.numel() <= batch.rows.input_ids.numel()
    blank = part_within(batch.blank(), 10)
    assert (blank.weight, blank.rows.weight, blank.tokens) == (0, 0, 0)
    judged = JudgedBatch(batch.rows, torch.arange(12) % 2 == 0, batch.rows, 12)
    found = part_within(judged, 30)
    assert found.others is None
    assert found.good.tolist() == [number % 2 == 0 for number in found.examples]
    assert part_within(replace(judged, weight=0), 30).weight == 0


@pytest.mark.parametrize("tokens", [1, 16, 30])
def test_a_part_of_padded_rows_has_the_packed_ones_examples(tokens):
    padded, packed = (part_within(pairs(Layout(0, packed=kind), 6), tokens) for kind in (False, True))
    assert padded.examples == packed.examples
    assert (padded.common, padded.weight, padded.rows.weight) == (packed.common, packed.weight, packed.rows.weight)
    assert same(padded.rows, in_padded_rows(packed, 0).rows)
    assert padded.weight == 1 or padded.rows.input_ids.numel() <= tokens


@pytest.mark.parametrize("packed", [False, True])
def test_the_shortest_are_whole_items_with_so_many_sequences(packed):
    layout = Layout(0, packed=packed)
    batch = to_batch(toy_examples(6), layout)
    order = sorted(range(6), key=batch.lengths.__getitem__)
    assert batch.lengths[order[1]] < batch.lengths[order[2]]
    found = shortest(batch, 2)
    assert found.examples == tuple(batch.examples[place] for place in sorted(order[:2]))
    assert found.tokens == sum(batch.lengths[place] for place in order[:2])
    both = pairs(layout, 6)
    longest = list(map(max, zip(both.rows.lengths[:6], both.rows.lengths[6:], strict=True)))
    pair = shortest(both, 2)
    assert (pair.weight, pair.rows.sequences) == (1, 2)
    assert pair.examples == (both.examples[longest.index(min(longest))],)
    assert shortest(both, 1).weight == 1  # one at least


@pytest.mark.parametrize("packed", [False, True])
def test_fewer_targets_are_the_last_ones_of_each_sequence(packed):
    batch = to_batch(toy_examples(6), Layout(0, packed=packed))
    found = with_fewer_targets(batch, 12)
    before, after = (in_padded_rows(one, 0).rows.targets for one in (batch, found))
    for row, own in zip(after, before, strict=True):
        learned = (own != IGNORE).nonzero().flatten()
        assert (row != IGNORE).nonzero().flatten().tolist() == learned[-2:].tolist()
    assert (after[after != IGNORE] == before[after != IGNORE]).all()
    assert found.weight == int((after != IGNORE).sum()) < batch.weight
    assert found.tokens == batch.tokens
    assert same(with_fewer_targets(batch, 10_000), batch)
    both = pairs(Layout(0, packed=packed))
    fewer = with_fewer_targets(both, 8)
    assert (fewer.weight, fewer.common, fewer.rows.weight) == (both.weight, both.common, 8)
    assert with_fewer_targets(both.blank(), 8).weight == 0


@pytest.mark.parametrize("packed", [False, True])
def test_the_end_of_one_long_sequence_is_as_long_as_asked(packed):
    (example,) = toy_examples(1)
    batch = to_batch([example], Layout(0, packed=packed))
    tokens = batch.tokens - 2
    found = end_of_one(batch, tokens)
    assert (found.tokens, found.rows.documents) == (tokens, (tokens,) if packed else ())
    assert torch.equal(found.rows.input_ids, batch.input_ids[:, 2:])
    assert torch.equal(found.rows.targets, batch.targets[:, 2:])
    assert found.weight == int((found.rows.targets != IGNORE).sum())
    unlearned = replace(batch, targets=torch.full_like(batch.targets, IGNORE))
    for same_one in (unlearned, batch.blank(), to_batch(toy_examples(2), Layout(0, packed=packed)), pairs(Layout(0))):
        assert end_of_one(same_one, 2) is same_one
    assert end_of_one(batch, batch.tokens) is batch
