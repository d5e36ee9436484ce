"""Prepare the micro-batches of the next steps in threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any


class Prefetcher:
    """Callable step -> batches that prepares the next steps in threads.

    The batches of a step are a function of its number, so prefetching cannot change them; a step that was not
    prefetched is built when it is requested. At most `workers` steps are kept ready. An exception is raised when its
    own step is requested.
    """

    def __init__(self, batches: Callable[[int], Sequence[Any]], pool: ThreadPoolExecutor, workers: int, last: int):
        self._batches, self._pool, self._workers, self._last = batches, pool, workers, last
        self._ready: dict[int, Future[Sequence[Any]]] = {}

    def __call__(self, step: int) -> Sequence[Any]:
        ahead = range(step + 1, min(step + self._workers, self._last) + 1)
        own = self._ready.pop(step, None)
        # After a rollback, the prefetched steps are not the next ones.
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
    """Prefetch `batches` (step, from 1 -> micro-batches) in threads. The threads end with the block, also on an
    interrupt.

    workers: number of threads; 0 disables prefetching.
    last: the last step that will be requested.
    """
    if not workers:
        yield batches
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
        try:
            yield Prefetcher(batches, pool, workers, last)
        finally:
            # An interrupt must not wait for steps that will not run.
            pool.shutdown(cancel_futures=True)
