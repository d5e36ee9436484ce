"""Packed rows of any kind of batch made comparable: the same examples in padded rows, or a part of them.

Kinds that are never packed come out as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.data.batch import Batch, JudgedBatch, PairBatch, Weighted
from surefoot.data.pack import documents_at, even_part, padded_rows, unpacked


def in_padded_rows(batch: Weighted, pad_id: int) -> Weighted:
    """The same examples, each sequence in a padded row of its own."""
    if isinstance(batch, Batch):
        return unpacked(batch, pad_id)
    if isinstance(batch, PairBatch):
        return replace(batch, rows=unpacked(batch.rows, pad_id))
    if isinstance(batch, JudgedBatch):
        others = None if batch.others is None else unpacked(batch.others, pad_id)
        return replace(batch, rows=unpacked(batch.rows, pad_id), others=others)
    return batch


def part_at_same_cost(batch: Weighted) -> Weighted:
    """Of a packed batch items of like length that take no more tokens in padded rows than all of it does packed: a
    packed batch again. One item where no two fit. What a step needs to know of answers that are not in it is left
    out."""
    budget = batch.rows.input_ids.numel()
    if isinstance(batch, Batch):
        return even_part(batch, budget)
    rows = batch.rows
    if isinstance(batch, PairBatch):
        count = len(batch.common)
        longest = [max(pair) for pair in zip(rows.documents[:count], rows.documents[count:], strict=True)]
        group = _largest(longest, budget / 2)
        both = [*group, *(count + place for place in group)]
        return replace(
            batch,
            rows=documents_at(rows, both),
            common=tuple(batch.common[place] for place in group),
            weight=len(group) if batch.weight else 0,
            reference=None if batch.reference is None else batch.reference[both],
        )
    if not isinstance(batch, JudgedBatch):
        return batch
    group = _largest(rows.documents, budget)
    return replace(
        batch,
        rows=documents_at(rows, group),
        good=batch.good[group],
        others=None,
        weight=len(group) if batch.weight else 0,
        reference=None if batch.reference is None else batch.reference[group],
    )


def _largest(lengths: Sequence[int], budget: float) -> list[int]:
    return sorted(max(padded_rows(lengths, budget), key=len))
