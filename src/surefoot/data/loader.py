"""The examples of one optimizer step, arranged into micro-batches with little padding, and made ready ahead of time.

Sorting by length happens within a step only: which examples a step holds was decided before, and how they are grouped
changes nothing but speed. The longest come first, so a step that does not fit fails at its first micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

from surefoot.data.batch import Batch, Weighted, collate
from surefoot.data.dataset import TokenisedDataset

AnyBatch = TypeVar("AnyBatch", bound=Weighted)


def micro_batches(
    dataset: TokenisedDataset,
    indices: Iterable[int],
    micro: int,
    pad_id: int,
    side: Literal["left", "right"] = "right",
) -> list[Batch]:
    """Batches of at most `micro` examples each, longest first; examples of one length keep their order."""
    by_length = sorted((int(index) for index in indices), key=dataset.length, reverse=True)
    return [
        collate([dataset[index] for index in by_length[start : start + micro]], pad_id, side)
        for start in range(0, len(by_length), micro)
    ]


def dealt(batches: Iterable[AnyBatch], rank: int, world: int) -> Iterator[AnyBatch]:
    """Of the micro-batches of all ranks those of one, dealt in turn; with a blank one at the end where they do not come
    out even, because the others would wait for it."""
    last, number = None, -1
    for number, batch in enumerate(batches):
        if number % world == rank:
            yield batch
        last = batch
    if last is not None and rank > number % world:
        yield last.blank()


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
    """`batches` (step -> its micro-batches, steps from 1), prepared ahead by so many threads; none: as it is. last: the
    last step that will be asked for. On the way out, also by an interrupt, no thread is left."""
    if not workers:
        yield batches
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        try:
            yield Prefetcher(batches, pool, workers, last)
        finally:
            pool.shutdown(cancel_futures=True)
