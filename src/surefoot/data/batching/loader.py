"""The examples of one optimizer step, arranged into micro-batches with little padding, and made ready ahead of time.

Sorting by length happens within a step only: which examples a step holds was decided before, and how they are grouped
changes nothing but speed. The longest come first, so a step that does not fit fails at its first micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from surefoot.data.batching.batch import (
    IGNORE,
    Batch,
    Example,
    JudgedBatch,
    PairBatch,
    PromptBatch,
    Weighted,
    collate,
    pack,
)
from surefoot.data.batching.packing import Layout
from surefoot.data.tokenize.dataset import TokenisedDataset

AnyBatch = TypeVar("AnyBatch", bound=Weighted)


def micro_batches(
    dataset: TokenisedDataset,
    indices: Iterable[int],
    micro: int,
    pad_id: int,
    side: Literal["left", "right"] = "right",
) -> list[Batch]:
    """Batches of at most `micro` examples each, longest first; examples of one length keep their order."""
    return [
        collate([dataset[index] for index in chunk], pad_id, side)
        for chunk in _by_length(indices, dataset.length, micro)
    ]


def to_batch(examples: Sequence[Example], layout: Layout) -> Batch:
    """The sequences of one micro-batch: a packed row, or padded rows."""
    return pack(examples) if layout.packed else collate(examples, layout.pad_id)


def seen_batch(dataset: TokenisedDataset, indices: Iterable[int], layout: Layout) -> Batch:
    """These examples as one micro-batch, with the pixels of their pictures."""
    return _with_pixels(dataset, [dataset[index] for index in indices], layout)


def _with_pixels(dataset: TokenisedDataset, examples: Sequence[Example], layout: Layout) -> Batch:
    batch, sight = to_batch(examples, layout), dataset.sight
    if sight is None or not any(example.pictures for example in examples):
        return batch
    made = {pictures: sight.pixels(pictures) for pictures in {one.pictures: None for one in examples}}
    pixels = tuple(made[example.pictures] for example in examples)
    return replace(batch, pixels=pixels, seen=(batch.input_ids == sight.token_id).int())


def example_batches(dataset: TokenisedDataset, indices: Iterable[int], layout: Layout) -> list[Batch]:
    """The examples of one step in the micro-batches of a layout."""
    own = [int(index) for index in indices]
    groups = layout.groups([(dataset.length(index),) for index in own])
    return [seen_batch(dataset, [own[place] for place in group], layout) for group in groups]


def all_example_batches(dataset: TokenisedDataset, layout: Layout) -> Iterator[Batch]:
    """The examples of a whole data set, the longest first: padding is small, and memory runs out at once or never."""
    for group in layout.groups_of_all([(int(length),) for length in dataset.lengths]):
        yield seen_batch(dataset, group, layout)


def with_progress(batches: Iterable[AnyBatch], on_batch: Callable[[int], None]) -> Iterator[AnyBatch]:
    """The same batches.

    on_batch: called before each with the number of examples that went before it.
    """
    done = 0
    for batch in batches:
        on_batch(done)
        yield batch
        done += len(batch.examples)


def for_rank(batches: Iterable[AnyBatch], rank: int, world: int) -> Iterator[AnyBatch]:
    """Of the micro-batches of all ranks those of one, dealt in turn; with a blank one at the end where they do not come
    out even, because the others would wait for it."""
    last, number = None, -1
    for number, batch in enumerate(batches):
        if number % world == rank:
            yield batch
        last = batch
    if last is not None and rank > number % world:
        yield last.blank()


def pair_batches(dataset: TokenisedDataset, pairs: Iterable[int], layout: Layout) -> list[PairBatch]:
    """Pairs in the micro-batches of a layout.

    pairs: all of one step; pair i has the examples 2i (better) and 2i + 1 (worse).
    """
    own = [int(pair) for pair in pairs]
    groups = layout.groups(dataset.lengths.reshape(-1, 2)[own].tolist())
    found = [_pair_batch(dataset, [own[place] for place in group], layout) for group in groups]
    better = sum(_better_tokens(one) for one in found)
    share = len(own) / better if better else 0.0
    return [replace(one, answer_share=share) for one in found]


def all_pairs(dataset: TokenisedDataset, layout: Layout) -> Iterator[PairBatch]:
    """The pairs of a whole data set as one step, the longest first: padding is small, and memory runs out at once or
    never."""
    count = len(dataset) // 2
    tokens = sum(dataset.supervised(2 * pair) for pair in range(count))
    for group in layout.groups_of_all(dataset.lengths.reshape(-1, 2).tolist()):
        yield replace(_pair_batch(dataset, group, layout), answer_share=count / tokens if tokens else 0.0)


def _pair_batch(dataset: TokenisedDataset, pairs: Sequence[int], layout: Layout) -> PairBatch:
    sides = [[dataset[2 * pair + side] for pair in pairs] for side in (0, 1)]
    common = tuple(common_beginning(*both) for both in zip(*sides, strict=True))
    return PairBatch(_with_pixels(dataset, [*sides[0], *sides[1]], layout), common, len(pairs))


def _better_tokens(batch: PairBatch) -> int:
    """Targets of the better answers, which come first."""
    targets, documents = batch.rows.targets, batch.rows.documents
    first = targets[0, : sum(documents[: batch.weight])] if documents else targets[: batch.weight]
    return int((first != IGNORE).sum())


def judged_batches(
    dataset: TokenisedDataset, indices: Iterable[int], layout: Layout, *, others: bool
) -> list[JudgedBatch]:
    """Judged answers in the micro-batches of a layout.

    indices: all of one step, in its order.
    others: give each prompt the answer of the next example of the step as well, the first one's to the last; no such
        row is longer than the longest example of the data, and a step of one example, which has no other, has no such
        rows.
    """
    step = [int(index) for index in indices]
    good, most = dataset.good(), int(dataset.lengths.max())
    count = int(good[step].sum())
    shares = [len(step) / part if part else 0.0 for part in (count, len(step) - count)]
    found = []
    for places in layout.groups([(dataset.length(index),) for index in step]):
        examples = [dataset[step[place]] for place in places]
        following = [dataset[step[(place + 1) % len(step)]] for place in places]
        swapped = [_with_answer(*both, most) for both in zip(examples, following, strict=True)]
        found.append(
            JudgedBatch(
                to_batch(examples, layout),
                torch.from_numpy(good[[step[place] for place in places]]),
                to_batch(swapped, layout) if others and len(step) > 1 else None,
                len(places),
                good_share=shares[0],
                bad_share=shares[1],
            )
        )
    return found


def prompt_batches(dataset: TokenisedDataset, indices: Iterable[int], micro: int, pad_id: int) -> list[PromptBatch]:
    """Batches of at most `micro` prompts each, longest first."""
    found = []
    for chunk in _by_length(indices, dataset.length, micro):
        examples = [dataset[index] for index in chunk]
        prompts = tuple(tuple(example.ids.tolist()) for example in examples)
        found.append(PromptBatch(collate(examples, pad_id), prompts, len(chunk)))
    return found


def _by_length(indices: Iterable[int], length: Callable[[int], int], micro: int) -> Iterator[list[int]]:
    ordered = sorted((int(index) for index in indices), key=length, reverse=True)
    yield from (ordered[start : start + micro] for start in range(0, len(ordered), micro))


def common_beginning(better: Example, worse: Example) -> int:
    """Tokens that both begin with."""
    shorter = min(len(better.ids), len(worse.ids))
    different = np.flatnonzero(better.ids[:shorter] != worse.ids[:shorter])
    return int(different[0]) if len(different) else shorter


def _with_answer(prompt: Example, other: Example, most: int) -> Example:
    """The prompt of one example with the answer of another, at most `most` tokens."""
    begin, answer = int(np.argmax(prompt.supervised)), int(np.argmax(other.supervised))
    ids = np.concatenate([prompt.ids[:begin], other.ids[answer:]])[:most]
    supervised = np.concatenate([prompt.supervised[:begin], other.supervised[answer:]])[:most]
    return Example(ids, supervised, prompt.number)


class Prefetcher:
    """Step -> its batches, of which those of the coming steps are prepared in threads.

    What a step holds is a function of its number, so it is the same whoever prepares it and whenever; a step that
    nobody has prepared is prepared when it is asked for. At most `workers` steps wait. A failure is raised by the step
    it belongs to.
    """

    def __init__(self, batches: Callable[[int], Sequence[Any]], pool: ThreadPoolExecutor, workers: int, last: int):
        self._batches, self._pool, self._workers, self._last = batches, pool, workers, last
        self._ready: dict[int, Future[Sequence[Any]]] = {}

    def __call__(self, step: int) -> Sequence[Any]:
        ahead = range(step + 1, min(step + self._workers, self._last) + 1)
        own = self._ready.pop(step, None)
        # After a rollback the steps that were prepared are not the ones that come.
        for other in [number for number in self._ready if number not in ahead]:
            self._ready.pop(other).cancel()
        for number in ahead:
            if number not in self._ready:
                self._ready[number] = self._pool.submit(self._batches, number)
        return self._batches(step) if own is None else own.result()


@contextmanager
def prefetched(
    batches: Callable[[int], Sequence[Any]], workers: int, *, last: int
) -> Iterator[Callable[[int], Sequence[Any]]]:
    """`batches` (step -> its micro-batches, steps from 1), prepared ahead in threads.

    On the way out, also by an interrupt, no thread is left.

    workers: threads; 0 leaves it as it is.
    last: the last step that will be asked for.
    """
    if not workers:
        yield batches
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        try:
            yield Prefetcher(batches, pool, workers, last)
        finally:
            # An interrupt must not wait for steps that nobody will take.
            pool.shutdown(cancel_futures=True)
