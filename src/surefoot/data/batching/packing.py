"""Which items of a step make up each micro-batch: packed rows, or padded rows within a token budget. Numbers alone.

An item is what stays together: an example, or both answers of a pair. A packed row holds whole examples end to end, as
documents that do not attend to each other; positions begin anew in each. Which items a step holds was decided before,
and a sum over their tokens is the same in any layout.

    layout = Layout(pad_id=0, tokens=4096, packed=True)
    for group in layout.groups([(120,), (64,), (80,)]):     # for each item the tokens of its sequences
        batch = to_batch([examples[place] for place in group], layout)     # in `loader`

Packed rows come out about equally long: each example, longest first, goes to the shortest row. For a given number of
rows this leaves none nearly empty, so that ranks, which are dealt rows in turn, wait less.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

Sizes = Sequence[Sequence[int]]  # of each item the tokens of its sequences, of which all items have as many


@dataclass(frozen=True)
class Layout:
    """How the items of a step become micro-batches.

    pad_id: of padded rows.
    most: items of a micro-batch; None: as many as fit.
    tokens: of a micro-batch, padding counted where rows are padded, unless one item alone has more; None: no limit.
    packed: a micro-batch is one row of documents.
    ranks: each gets as many packed rows, where there are enough items.
    """

    pad_id: int
    most: int | None = None
    tokens: int | None = None
    packed: bool = False
    ranks: int = 1

    def groups(self, sizes: Sizes) -> list[list[int]]:
        """Places of the items of one step, micro-batch by micro-batch, the longest first."""
        if not self.packed:
            return self._padded(sizes)
        own = [sum(item) for item in sizes]
        return packed_rows(own, self.tokens or sum(own), most=self.most, multiple=self.ranks)

    def groups_of_all(self, sizes: Sizes) -> list[list[int]]:
        """The same for the items of a whole data set, however many."""
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
    """Places in `lengths`, row by row, the longest row first and in it the longest example first.

    budget: tokens that a row has at most, unless one example alone has more.
    most: examples of a row.
    multiple: the number of rows is one of it where there are enough examples: of ranks, none then computes a blank row.
    """
    ordered = _longest_first(lengths)
    if not ordered:
        return []
    room = max(budget, lengths[ordered[0]])
    fewest = max(math.ceil(sum(lengths) / room), math.ceil(len(ordered) / (most or len(ordered))))
    # By tokens alone the fewest rows may do; long examples may not fit into so few, and then one more is tried.
    for count in range(_up(fewest, multiple), len(ordered), multiple):
        rows = _spread(ordered, lengths, count)
        if all(sum(lengths[place] for place in row) <= room and len(row) <= (most or len(row)) for row in rows):
            return sorted(rows, key=lambda row: sum(lengths[place] for place in row), reverse=True)
    return [[place] for place in ordered]


def padded_rows(lengths: Sequence[int], budget: float, *, most: int | None = None) -> list[list[int]]:
    """As `packed_rows` for examples that are padded to the longest one beside them: micro-batches of neighbours by
    length, the longest first, of at most `budget` tokens with their padding."""
    found: list[list[int]] = []
    for place in _longest_first(lengths):
        last = found[-1] if found else []
        if last and len(last) != most and (len(last) + 1) * lengths[last[0]] <= budget:
            last.append(place)
        else:
            found.append([place])
    return found


def packed_in_turn(lengths: Sequence[int], budget: int, *, most: int | None = None) -> list[list[int]]:
    """As `packed_rows` for a whole data set, in one pass over it: rows of neighbours by length, the longest examples
    first. They are not equally long; over so many rows that evens out."""
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
    """Places, those of one length in their order."""
    return sorted(range(len(lengths)), key=lambda place: lengths[place], reverse=True)


def _spread(ordered: Sequence[int], lengths: Sequence[int], count: int) -> list[list[int]]:
    """Each place in its turn to the row that is shortest so far, of several such to the first."""
    rows: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, number) for number in range(count)]
    for place in ordered:
        tokens, number = filled[0]
        rows[number].append(place)
        heapq.heapreplace(filled, (tokens + lengths[place], number))
    return [row for row in rows if row]


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
