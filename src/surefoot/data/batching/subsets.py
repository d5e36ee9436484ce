"""Derive smaller or padded versions of a batch, for comparing fast paths with the plain code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from surefoot.data.batching.batch import (
    IGNORE,
    Batch,
    DrawnBatch,
    JudgedBatch,
    PairBatch,
    Weighted,
    documents_at,
    unpacked,
)
from surefoot.data.batching.loader import padded_rows


def in_padded_rows(batch: Weighted, pad_id: int) -> Weighted:
    """Return the same examples, with each sequence in its own padded row."""
    if isinstance(batch, Batch):
        return unpacked(batch, pad_id)
    if isinstance(batch, PairBatch | DrawnBatch):
        return replace(batch, rows=unpacked(batch.rows, pad_id))
    if isinstance(batch, JudgedBatch):
        others = None if batch.others is None else unpacked(batch.others, pad_id)
        return replace(batch, rows=unpacked(batch.rows, pad_id), others=others)
    return batch


def part_within(batch: Weighted, tokens: int) -> Weighted:
    """Select items of similar length that need at most `tokens` tokens in padded rows (for pairs: both sequences), but
    at least one item. A packed batch stays packed. Fields that depend on other answers of the step are removed. Empty
    batches, and rollout batches, are returned unchanged."""
    return _part(batch, lambda lengths, sequences: _largest(lengths, tokens / sequences))


def shortest(batch: Weighted, sequences: int) -> Weighted:
    """Select the items with the fewest tokens, `sequences` sequences in total, but at least one item. Otherwise like
    `part_within`."""

    def pick(lengths: Sequence[int], each: int) -> list[int]:
        order = sorted(range(len(lengths)), key=lengths.__getitem__)
        return sorted(order[: max(sequences // each, 1)])

    return _part(batch, pick)


def with_fewer_targets(batch: Weighted, most: int) -> Weighted:
    """Return the batch with about `most` supervised tokens at most, the last ones of each sequence, so that the logits
    at all of them need little memory. Rollout batches are returned unchanged."""
    rows = batch.rows
    if not isinstance(batch, Batch | PairBatch | JudgedBatch) or not rows.sequences:
        return batch
    each = max(most // rows.sequences, 1)
    parts = rows.targets.split(rows.documents, dim=1) if rows.documents else [rows.targets]
    targets = torch.cat([_last(part, each) for part in parts], dim=1)
    fewer = replace(rows, targets=targets, weight=int((targets != IGNORE).sum()) if rows.weight else 0)
    return fewer if isinstance(batch, Batch) else replace(batch, rows=fewer)


def end_of_one(batch: Weighted, tokens: int) -> Weighted:
    """Return the last `tokens` tokens of a batch that is one longer sequence without pictures, if any of them are
    supervised; other batches are returned unchanged."""
    rows = batch.rows
    if not isinstance(batch, Batch) or len(rows.lengths) != 1 or rows.pictures or rows.attention_mask is not None:
        return batch
    end = rows.lengths[0]
    own = slice(max(end - tokens, 0), end)
    targets = rows.targets[:, own]
    if end <= tokens or not (weight := int((targets != IGNORE).sum())):
        return batch
    documents = (tokens,) if rows.documents else ()
    ids = rows.input_ids[:, own]
    return replace(rows, input_ids=ids, targets=targets, weight=weight, lengths=(tokens,), documents=documents)


def _last(targets: torch.Tensor, count: int) -> torch.Tensor:
    """Keep the last `count` supervised tokens of each row."""
    supervised = (targets != IGNORE).flip(1).cumsum(dim=1).flip(1)  # from there to the end of the row
    return targets.where(supervised <= count, IGNORE)


def _part(batch: Weighted, pick: Callable[[Sequence[int], int], list[int]]) -> Weighted:
    """Select items of a batch. `pick` maps (tokens of the longest sequence of each item, sequences per item) to the
    indices of the selected items."""
    rows = batch.rows
    lengths = rows.documents or rows.lengths
    if not lengths or (not rows.documents and rows.attention_mask is not None):
        return batch
    if isinstance(batch, Batch):
        return _at(batch, pick(lengths, 1))
    if isinstance(batch, PairBatch):
        count = len(batch.common)
        longest = [max(pair) for pair in zip(lengths[:count], lengths[count:], strict=True)]
        group = pick(longest, 2)
        both = [*group, *(count + place for place in group)]
        return replace(
            batch,
            rows=_at(rows, both),
            common=tuple(batch.common[place] for place in group),
            weight=len(group) if batch.weight else 0,
            reference=None if batch.reference is None else batch.reference[both],
        )
    if not isinstance(batch, JudgedBatch):
        return batch
    group = pick(lengths, 1)
    return replace(
        batch,
        rows=_at(rows, group),
        good=batch.good[group],
        others=None,
        weight=len(group) if batch.weight else 0,
        reference=None if batch.reference is None else batch.reference[group],
    )


def longest_row(rows: Batch) -> Batch:
    """Return the longest sequence alone, without padding. Rows padded on the left are returned unchanged."""
    lengths = rows.documents or rows.lengths
    if not lengths or (not rows.documents and rows.attention_mask is not None):
        return rows
    one = _at(rows, [max(range(len(lengths)), key=lengths.__getitem__)])
    return replace(one, documents=())


def _at(rows: Batch, places: Sequence[int]) -> Batch:
    """Select documents of a packed row, or rows padded on the right."""
    if rows.documents:
        return documents_at(rows, places)
    lengths = tuple(rows.lengths[place] for place in places)
    longest = max(lengths)
    targets = rows.targets[list(places), :longest]
    return Batch(
        rows.input_ids[list(places), :longest],
        targets,
        None,
        int((targets != IGNORE).sum()),
        lengths,
        tuple(rows.examples[place] for place in places),
        pictures=(lambda: tuple(rows.pixels[place] for place in places)) if rows.pictures else None,
        seen=None if rows.seen is None else rows.seen[list(places), :longest],
        digests=tuple(rows.digests[place] for place in places) if rows.digests else (),
    )


def _largest(lengths: Sequence[int], tokens: float) -> list[int]:
    return sorted(max(padded_rows(lengths, tokens), key=len))
