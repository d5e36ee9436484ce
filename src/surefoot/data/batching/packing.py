"""Group the items of a step into micro-batches: packed rows, or padded rows within a token budget. Lengths only.

An item is an example, or both answers of a pair. A packed row holds whole examples, concatenated as documents that do
not attend to each other and whose positions start at 0. The data order decides which items a step has, so a sum over
their tokens is the same in any layout.

    layout = Layout(pad_id=0, tokens=4096, packed=True)
    for group in layout.groups([(120,), (64,), (80,)]):     # token counts of each item's sequences
        batch = to_batch([examples[place] for place in group], layout)     # in `loader`

Packed rows have about equal lengths: each example, longest first, goes to the shortest row. No row is then nearly
empty, and ranks, which get rows round-robin, wait less for each other.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

Sizes = Sequence[Sequence[int]]  # token counts of the sequences of each item; all items have equally many sequences


@dataclass(frozen=True)
class Layout:
    """How the items of a step are grouped into micro-batches.

    pad_id: token that fills padded rows.
    most: maximum items per micro-batch; None: no limit.
    tokens: maximum tokens per micro-batch, including padding, unless a single item has more; None: no limit.
    packed: a micro-batch is one packed row of documents.
    ranks: number of ranks; the number of packed rows is a multiple of it if there are enough items.
    """

    pad_id: int
    most: int | None = None
    tokens: int | None = None
    packed: bool = False
    ranks: int = 1

    def groups(self, sizes: Sizes) -> list[list[int]]:
        """Group the items of one step. Returns item indices per micro-batch, the longest micro-batch first."""
        if not self.packed:
            return self._padded(sizes)
        own = [sum(item) for item in sizes]
        return packed_rows(own, self.tokens or sum(own), most=self.most, multiple=self.ranks)

    def groups_of_all(self, sizes: Sizes) -> list[list[int]]:
        """Group the items of a whole data set, in one pass."""
        if not self.packed:
            return self._padded(sizes)
        own = [sum(item) for item in sizes]
        return packed_in_turn(own, self.tokens or sum(own), most=self.most)

    def _padded(self, sizes: Sizes) -> list[list[int]]:
        if not sizes:
            return []
        room = math.inf if self.tokens is None else self.tokens / len(sizes[0])
        return padded_rows([max(item) for item in sizes], room, most=self.most)


def packed_rows(lengths: Sequence[int], budget: int, *, most: int | None = None, multiple: int = 1) -> list[list[int]]:
    """Pack examples into rows of about equal length. Returns indices into `lengths` per row, the longest row first and
    in it the longest example first.

    budget: maximum tokens of a row, unless a single example has more.
    most: maximum examples of a row.
    multiple: number of ranks; the number of rows is a multiple of it if there are enough examples, so that no rank
        computes a blank row.
    """
    ordered = _longest_first(lengths)
    if not ordered:
        return []
    room = max(budget, lengths[ordered[0]])
    fewest = max(math.ceil(sum(lengths) / room), math.ceil(len(ordered) / (most or len(ordered))))
    # `fewest` is a lower bound by total tokens; if long examples do not fit into so few rows, try more.
    for count in range(_up(fewest, multiple), len(ordered), multiple):
        rows = _spread(ordered, lengths, count)
        if all(sum(lengths[place] for place in row) <= room and len(row) <= (most or len(row)) for row in rows):
            return sorted(rows, key=lambda row: sum(lengths[place] for place in row), reverse=True)
    return [[place] for place in ordered]


def padded_rows(lengths: Sequence[int], budget: float, *, most: int | None = None) -> list[list[int]]:
    """Group examples of similar length into padded micro-batches, the longest first, of at most `budget` tokens
    including padding. Arguments as in `packed_rows`."""
    found: list[list[int]] = []
    for place in _longest_first(lengths):
        last = found[-1] if found else []
        if last and len(last) != most and (len(last) + 1) * lengths[last[0]] <= budget:
            last.append(place)
        else:
            found.append([place])
    return found


def packed_in_turn(lengths: Sequence[int], budget: int, *, most: int | None = None) -> list[list[int]]:
    """Pack a whole data set in one pass: rows of examples of similar length, the longest first. The rows' lengths
    differ more than with `packed_rows`, which averages out over many rows."""
    found: list[list[int]] = []
    tokens = 0
    for place in _longest_first(lengths):
        last = found[-1] if found else []
        if last and len(last) != most and tokens + lengths[place] <= budget:
            last.append(place)
            tokens += lengths[place]
        else:
            found.append([place])
            tokens = lengths[place]
    return found


def _longest_first(lengths: Sequence[int]) -> list[int]:
    """Return indices by descending length; those of equal length keep their order."""
    return sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)


def _spread(ordered: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Assign each index in turn to the row that is shortest so far (the first of equally short ones)."""
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for place in ordered:
        tokens, number = filled[0]
        rows[number].append(place)
        heapq.heapreplace(filled, (tokens + lengths[place], number))
    return [row for row in rows if row]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
