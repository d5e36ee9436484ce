"""Build the micro-batches of an optimizer step, padded or packed.

The data order decides which examples a step has; here they are grouped by length, which affects only speed. The longest
come first, so a step that does not fit into memory fails at its first micro-batch.

An item is an example, or both answers of a pair. Padded rows keep to a token budget. A packed row holds whole examples,
concatenated as documents that do not attend to each other and whose positions start at 0; packed rows have about equal
lengths (each example, longest first, goes to the shortest row), so that no row is nearly empty, and ranks, which get
rows round-robin, wait less for each other.

    layout = Layout(pad_id=0, tokens=4096, packed=True)
    for group in layout.groups([(120,), (64,), (80,)]):     # token counts of each item's sequences
        batch = to_batch([examples[place] for place in group], layout)
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import torch

from surefoot.data.batching.batch import (
    IGNORE,
    Batch,
    Example,
    JudgedBatch,
    PairBatch,
    Pixels,
    PromptBatch,
    Weighted,
    collate,
    example_digest,
    pack,
)
from surefoot.data.tokenize.dataset import TokenizedDataset
from surefoot.data.tokenize.picture_processor import PictureProcessor

AnyBatch = TypeVar("AnyBatch", bound=Weighted)
Sizes = Sequence[Sequence[int]]  # token counts of the sequences of each item; all items have equally many sequences


@dataclass(frozen=True)
class Layout:
    """How the items of a step are grouped into micro-batches.

    pad_id: token that fills padded rows.
    most: maximum items per micro-batch; None: no limit.
    tokens: maximum tokens per micro-batch, including padding, unless a single item has more; None: no limit.
    packed: a micro-batch is one packed row of documents.
    ranks: number of ranks; the number of packed rows is a multiple of it if there are enough items.
    alike: the micro-batches that ranks compute at the same time all have pictures or none has; see `filled`.
    """

    pad_id: int
    most: int | None = None
    tokens: int | None = None
    packed: bool = False
    ranks: int = 1
    alike: bool = False

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


def micro_batches(
    dataset: TokenizedDataset,
    indices: Iterable[int],
    micro: int,
    pad_id: int,
    side: Literal["left", "right"] = "right",
) -> list[Batch]:
    """Build padded batches of at most `micro` examples, longest first; examples of equal length keep their order."""
    own = [int(index) for index in indices]
    groups = padded_rows([dataset.length(index) for index in own], math.inf, most=micro)
    return [collate([dataset[own[place]] for place in group], pad_id, side) for group in groups]


def to_batch(examples: Sequence[Example], layout: Layout) -> Batch:
    """Build one micro-batch: a packed row or padded rows, depending on the layout."""
    return pack(examples) if layout.packed else collate(examples, layout.pad_id)


def batch_of(examples: Sequence[Example], layout: Layout, processor: PictureProcessor | None) -> Batch:
    """Build one micro-batch of these examples, whose pictures are read later: another rank's are not needed."""
    batch = to_batch(examples, layout)
    if processor is None or not any(example.pictures for example in examples):
        return batch
    shown = tuple(example.pictures for example in examples)
    digests = tuple(example_digest(example).hex() for example in examples)

    @functools.cache
    def pictures() -> tuple[Pixels, ...]:
        made = {own: processor.pixels(own) for own in dict.fromkeys(shown)}
        return tuple(made[own] for own in shown)

    return replace(batch, pictures=pictures, seen=(batch.input_ids == processor.token_id).int(), digests=digests)


def _by_pictures(
    groups: Iterable[list[int]], layout: Layout, processor: PictureProcessor | None, count: Callable[[int], int]
) -> Iterable[list[int]]:
    """Split micro-batches whose rows must have equally many pictures, and those of which all or none must have any:
    these come with pictures first. count: item of a group -> its pictures."""
    if processor is None or not (processor.by_row or layout.alike):
        return groups
    most = math.inf if processor.by_row else 1
    found: dict[bool, list[list[int]]] = {True: [], False: []}
    for group in groups:
        alike: dict[float, list[int]] = {}
        for index in group:
            alike.setdefault(min(count(index), most), []).append(index)
        for number, own in alike.items():
            found[number > 0 or not layout.alike].append(own)
    return [*found[True], *found[False]]


def filled(batches: Iterable[AnyBatch], layout: Layout) -> Iterator[AnyBatch]:
    """Pass the micro-batches through, which `_by_pictures` has ordered. If they must be alike, blank ones make those
    with pictures a multiple of the ranks: a rank that skips the vision tower while another runs it would miss the
    collectives of sharded weights or gradients there."""
    before, number = None, 0
    for batch in batches:
        if layout.alike and before is not None and (batch.rows.pictures is None) != (before.rows.pictures is None):
            yield from [before.blank()] * (-number % layout.ranks)
            number = 0
        yield batch
        before, number = batch, number + 1


def example_batches(dataset: TokenizedDataset, indices: Iterable[int], layout: Layout) -> list[Batch]:
    """Build the micro-batches of one step."""
    return batches_of([dataset[int(index)] for index in indices], layout, dataset.processor)


def grouped(examples: Sequence[Example], layout: Layout, processor: PictureProcessor | None) -> list[list[int]]:
    """Group the examples of one step. Returns indices per micro-batch, those with pictures first where they must be
    alike, else the longest first. The batches made of them go through `filled`."""
    groups = layout.groups([(len(one.ids),) for one in examples])
    return list(_by_pictures(groups, layout, processor, lambda place: len(examples[place].pictures)))


def batches_of(examples: Sequence[Example], layout: Layout, processor: PictureProcessor | None = None) -> list[Batch]:
    """Build the micro-batches of these examples."""
    groups = grouped(examples, layout, processor)
    made = (batch_of([examples[place] for place in group], layout, processor) for group in groups)
    return list(filled(made, layout))


def all_example_batches(dataset: TokenizedDataset, layout: Layout) -> Iterator[Batch]:
    """Iterate over a whole data set, longest examples first: little padding, and out of memory happens at once or
    never."""
    groups = layout.groups_of_all([(int(length),) for length in dataset.lengths])
    groups = _by_pictures(groups, layout, dataset.processor, dataset.picture_count)
    made = (batch_of([dataset[index] for index in group], layout, dataset.processor) for group in groups)
    yield from filled(made, layout)


def with_progress(batches: Iterable[AnyBatch], on_batch: Callable[[int], None]) -> Iterator[AnyBatch]:
    """Pass the batches through, and report progress.

    on_batch: called before each batch with the number of examples in the batches before it.
    """
    done = 0
    for batch in batches:
        on_batch(done)
        yield batch
        done += len(batch.examples)


def for_rank(batches: Iterable[AnyBatch], rank: int, world: int) -> Iterator[AnyBatch]:
    """Select one rank's micro-batches, dealt round-robin, and read their pictures. If their number is not a multiple of
    `world`, ranks without a last one get a blank batch, so that all ranks run the same number of forward passes."""
    last, number = None, -1
    for number, batch in enumerate(batches):
        if number % world == rank:
            yield _with_pixels(batch)
        last = batch
    if last is not None and rank > number % world:
        yield _with_pixels(last.blank())


def _with_pixels(batch: AnyBatch) -> AnyBatch:
    """Read the pictures now, in this thread: `prefetched` has threads for it. Those of prompts are read with their
    answers."""
    if not isinstance(batch, PromptBatch):
        _ = batch.rows.pixels
    return batch


def own_batches(
    batches: Callable[[int], Sequence[AnyBatch]], rank: int = 0, world: int = 1
) -> Callable[[int], list[AnyBatch]]:
    """Return the function step -> micro-batches of one rank. batches: those of all ranks."""
    return lambda step: list(for_rank(batches(step), rank, world))


def pair_batches(dataset: TokenizedDataset, pairs: Iterable[int], layout: Layout) -> list[PairBatch]:
    """Build the micro-batches of one step of pairs.

    pairs: indices of all pairs of the step; pair i has the examples 2i (better) and 2i + 1 (worse).
    """
    own = [int(pair) for pair in pairs]
    groups = [[own[i] for i in group] for group in layout.groups(dataset.lengths.reshape(-1, 2)[own].tolist())]
    made = (_pair_batch(dataset, group, layout) for group in _pairs_by_pictures(dataset, groups, layout))
    found = list(filled(made, layout))
    better = sum(_better_tokens(one) for one in found)
    shares = {"answer_share": len(own) / better if better else 0.0, "row_share": _row_share(dataset, own)}
    return [replace(one, **shares) for one in found]


def all_pairs(dataset: TokenizedDataset, layout: Layout) -> Iterator[PairBatch]:
    """Iterate over all pairs of a data set as one step, longest first: little padding, and out of memory happens at
    once or never."""
    count = len(dataset) // 2
    tokens = sum(dataset.supervised(2 * pair) for pair in range(count))
    shares = {"answer_share": count / tokens if tokens else 0.0, "row_share": _row_share(dataset, range(count))}
    groups = layout.groups_of_all(dataset.lengths.reshape(-1, 2).tolist())
    made = (_pair_batch(dataset, group, layout) for group in _pairs_by_pictures(dataset, groups, layout))
    yield from filled((replace(one, **shares) for one in made), layout)


def _pairs_by_pictures(dataset: TokenizedDataset, groups: Iterable[list[int]], layout: Layout) -> Iterable[list[int]]:
    return _by_pictures(groups, layout, dataset.processor, lambda pair: dataset.picture_count(2 * pair))


def _row_share(dataset: TokenizedDataset, pairs: Sequence[int]) -> float:
    """Return the pairs / the tokens of their better rows that follow another."""
    following = int(dataset.lengths[[2 * pair for pair in pairs]].sum()) - len(pairs)
    return len(pairs) / following if following else 0.0


def _pair_batch(dataset: TokenizedDataset, pairs: Sequence[int], layout: Layout) -> PairBatch:
    sides = [[dataset[2 * pair + side] for pair in pairs] for side in (0, 1)]
    common = tuple(common_beginning(*both) for both in zip(*sides, strict=True))
    return PairBatch(batch_of([*sides[0], *sides[1]], layout, dataset.processor), common, len(pairs))


def _better_tokens(batch: PairBatch) -> int:
    """Count the targets of the better answers, which come first in the batch."""
    targets, documents = batch.rows.targets, batch.rows.documents
    first = targets[0, : sum(documents[: batch.weight])] if documents else targets[: batch.weight]
    return int((first != IGNORE).sum())


def judged_batches(
    dataset: TokenizedDataset, indices: Iterable[int], layout: Layout, *, others: bool
) -> list[JudgedBatch]:
    """Build the micro-batches of one step of judged answers (KTO).

    indices: all examples of the step, in order.
    others: also pair each prompt with the answer of the next example of the step (the last with the first one's), for
        the KL estimate. These rows are truncated to the longest example of the data; a step of one example has none.
    """
    step = [int(index) for index in indices]
    good, most = dataset.good, int(dataset.lengths.max())
    count = int(good[step].sum())
    shares = [len(step) / part if part else 0.0 for part in (count, len(step) - count)]

    def made(places: Sequence[int]) -> JudgedBatch:
        examples = [dataset[step[place]] for place in places]
        following = [dataset[step[(place + 1) % len(step)]] for place in places]
        swapped = [_with_answer(*both, most) for both in zip(examples, following, strict=True)]
        rows = batch_of(examples, layout, dataset.processor)
        pairs_others = others and len(step) > 1
        return JudgedBatch(
            rows,
            torch.from_numpy(good[[step[place] for place in places]]),
            # The same pictures, which are read once.
            replace(batch_of(swapped, layout, dataset.processor), pictures=rows.pictures) if pairs_others else None,
            len(places),
            good_share=shares[0],
            bad_share=shares[1],
        )

    groups = layout.groups([(dataset.length(index),) for index in step])
    groups = _by_pictures(groups, layout, dataset.processor, lambda place: dataset.picture_count(step[place]))
    return list(filled(map(made, groups), layout))


def prompt_batches(dataset: TokenizedDataset, indices: Iterable[int], layout: Layout) -> list[PromptBatch]:
    """Build the batches of the prompts of one step."""
    examples = [dataset[int(index)] for index in indices]

    def made(group: Sequence[int]) -> PromptBatch:
        own = [examples[place] for place in group]
        prompts = tuple(tuple(example.ids.tolist()) for example in own)
        return PromptBatch(batch_of(own, layout, dataset.processor), prompts, len(own))

    return list(filled(map(made, grouped(examples, layout, dataset.processor)), layout))


def common_beginning(better: Example, worse: Example) -> int:
    """Return the number of leading tokens that both have in common."""
    shorter = min(len(better.ids), len(worse.ids))
    different = np.flatnonzero(better.ids[:shorter] != worse.ids[:shorter])
    return int(different[0]) if len(different) else shorter


def _with_answer(prompt: Example, other: Example, most: int) -> Example:
    """Join the prompt of one example and the answer of another, truncated to `most` tokens."""
    begin, answer = int(np.argmax(prompt.supervised)), int(np.argmax(other.supervised))
    ids = np.concatenate([prompt.ids[:begin], other.ids[answer:]])[:most]
    supervised = np.concatenate([prompt.supervised[:begin], other.supervised[answer:]])[:most]
    return Example(ids, supervised, prompt.number, prompt.pictures)
