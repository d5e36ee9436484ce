"""How the items of a step become micro-batches: so many of them or so many tokens, in padded rows or in packed ones.

An item is what stays together: an example, or both answers of a pair. Which items a step holds was decided before.

    layout = Layout(pad_id=0, tokens=4096, packed=True)
    for group in layout.groups([(120,), (64,), (80,)]):     # of each item the tokens of its sequences
        batch = layout.batch([examples[place] for place in group])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.data.batch import Batch, Example, collate
from surefoot.data.pack import pack, packed_in_turn, packed_rows, padded_rows

Sizes = Sequence[Sequence[int]]  # of each item the tokens of its sequences, of which all items have as many


@dataclass(frozen=True)
class Layout:
    """pad_id: of padded rows. most: items of a micro-batch; None: as many as fit. tokens: of a micro-batch, padding
    counted where rows are padded, unless one item alone has more; None: no limit. packed: a micro-batch is one row of
    documents. ranks: each gets as many packed rows, where there are enough items."""

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

    def batch(self, examples: Sequence[Example]) -> Batch:
        """The sequences of one micro-batch."""
        return pack(examples) if self.packed else collate(examples, self.pad_id)

    def _padded(self, sizes: Sizes) -> list[list[int]]:
        if not sizes:
            return []
        room = math.inf if self.tokens is None else self.tokens / len(sizes[0])
        return padded_rows([max(item) for item in sizes], room, most=self.most)
